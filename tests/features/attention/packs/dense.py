"""A tiny dense model on Megatron's own modules: grouped heads, rotary embedding in the model."""

from __future__ import annotations

from typing import Any

import torch

from tests.support import model as job


def config(**overrides: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    values: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "add_bias_linear": False,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
    }
    return TransformerConfig(**{**values, **overrides})


def gpt_model(cfg: Any, vp_stage: int | None = None) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    model = GPTModel(
        config=cfg,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=job.VOCABULARY,
        max_sequence_length=job.SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
    )
    job.fill_by_name(model)
    return model
