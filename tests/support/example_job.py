"""The main job on the ranks of a pool; collects the data that ``parity.py`` compares."""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from tests.support import memory_events
from tests.support.gradient_pieces import Piece
from tests.support.model import ends
from tests.support.observe import Choices, Fault, Key, Observer, Place


@dataclass(frozen=True)
class RankOutcome:
    """One rank's results of a job: the job's records of every step, the rank's choices, memory events.

    ``rows`` has the places of its rows in the whole sequence, ``[microbatch, row]`` for each kind of choice.
    ``gradients`` are the rank's pieces in the first and the last step, if requested.
    """

    records: list[dict[str, Any]]
    place: Place
    rows: dict[Key, npt.NDArray[np.int64]]
    choices: Choices
    memory: Counter[str]
    gradients: list[list[Piece]]


def train(
    argv: Sequence[str],
    *,
    stock: bool = False,
    switches: Mapping[str, Any] | None = None,
    gradients: bool = False,
    forced: Choices | None = None,
    fault: Fault | None = None,
    signs: bool = False,
    selects: bool = True,
) -> RankOutcome:
    """Run the job of ``examples/`` with these flags.

    Args:
        argv: flags of ``pretrain_dsa.py``.
        stock: whether to train Megatron's dense GPT, with only the platform and ``switches`` enabled.
        switches: arguments of ``mindspeed_dsa.enable`` in addition to the job's.
        gradients: see :class:`Observer`, as for ``forced`` and ``fault``.
        forced: choices to impose.
        fault: gradient to spoil.
        signs: whether choices include the signs of indexers' products.
        selects: whether fused indexers select keys.
    """
    from dsa_job.app import told
    from dsa_job.arguments import parse_args
    from dsa_job.validation import World, check

    import mindspeed_dsa

    # The switches decide whether DSA is fused: only the job's own parser would see its default.
    args = parse_args(["--no-use-fused-dsa", *argv])
    if stock and not switches:
        from mindspeed_dsa import session

        session.enable_from_argv([])  # as the one-liner does on its first import
    else:
        check(args, World.from_environment())
        mindspeed_dsa.enable(**{**({} if stock else told(args)), **(switches or {})})
        mindspeed_dsa.validate(args)

    from dsa_job import training

    observer = Observer(args, gradients, forced, fault, signs)
    stepper_class = training.Stepper

    def watched_stepper(*parts: Any) -> Any:
        stepper = stepper_class(*parts)
        observer.attach(stepper)
        return stepper

    with (
        mock.patch.object(training, "Stepper", watched_stepper),
        observer.watching_fused_indexers(),
        instead_of_dsa(stock),
        memory_events.counted() as memory,
    ):
        records = training.train(args)
    assert observer.place is not None
    wants_fused = selects and bool((switches or {}).get("use_fused_dsa"))
    assert (observer.fused_selections > 0) == wants_fused, f"{observer.fused_selections} fused selections"
    steps = [dict(record) for record in records]
    return RankOutcome(steps, observer.place, observer.rows, observer.choices, memory, observer.gradients)


def read(checkpoints: Sequence[tuple[str, int]]) -> list[dict[str, torch.Tensor]]:
    """Return all tensors of distributed checkpoints, whole, by their keys.

    Args:
        checkpoints: folders and steps.
    """
    from megatron.core import dist_checkpointing

    contents = [
        dist_checkpointing.load_plain_tensors(str(Path(folder) / f"iter_{step:07d}"))
        for folder, step in checkpoints
    ]
    return [{k: v for k, v in content.items() if isinstance(v, torch.Tensor)} for content in contents]


@contextlib.contextmanager
def instead_of_dsa(active: bool) -> Iterator[None]:
    """Make the job build Megatron's plain GPT: multi-head attention, LayerNorm, dense MLP.

    It is the control, which no DSA repair changes.
    """
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
    from megatron.core.transformer.transformer_config import TransformerConfig

    same_names = (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "init_method_std"),
        *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
        *("virtual_pipeline_model_parallel_size", "overlap_p2p_comm"),
    )
    return TransformerConfig(
        **{name: getattr(args, name) for name in same_names},
        attention_dropout=0.0,
        hidden_dropout=0.0,
        add_bias_linear=False,
        batch_p2p_comm=not args.overlap_p2p_comm,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        deterministic_mode=True,
    )


def _build_chunk(args: argparse.Namespace, config: Any, stage: int | None) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    where: dict[str, Any] = {} if stage is None else {"ignore_virtual": False, "vp_stage": stage}
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        **ends(args.padded_vocab_size, args.seq_length, **where),
        vp_stage=stage,
    )
    model.vp_stage = stage
    return model
