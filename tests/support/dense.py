"""A stock dense GPT in the main job's place: the control, which no DSA repair has touched."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def instead_of_dsa(active: bool) -> Iterator[None]:
    """Make the job build Megatron's plain GPT: multi-head attention, LayerNorm, dense MLP."""
    if not active:
        yield
        return
    from dsa_job import model, training

    with (
        mock.patch.object(training, "model_config", _config),
        mock.patch.object(model, "_build_chunk", _build_chunk),
    ):
        yield


def _config(args: argparse.Namespace) -> Any:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=args.init_method_std,
        add_bias_linear=False,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        overlap_p2p_comm=args.overlap_p2p_comm,
        batch_p2p_comm=not args.overlap_p2p_comm,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        deterministic_mode=True,
    )


def _build_chunk(args: argparse.Namespace, config: Any, stage: int | None) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    where: dict[str, Any] = {} if stage is None else {"ignore_virtual": False, "vp_stage": stage}
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        position_embedding_type="rope",
        vp_stage=stage,
    )
    model.vp_stage = stage
    return model
