"""What the ranks of ``test_resume_across_layouts.py`` do."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.support import example_job


@dataclass(frozen=True)
class Resumed:
    """A run that goes on from a checkpoint, as one rank saw it.

    Attributes:
        losses: loss and gradient norm of each step.
        counts: steps that the optimizers of torch have counted, right after loading.
        groups: ``(is_expert_parallel, wd_mult, weight_decay, lr, betas, eps)`` of those with parameters.
        experts: how many parameters Megatron marks as an expert parallel rank's own.
        optimizers: how many Megatron has chained.
    """

    losses: list[tuple[float, float]]
    counts: set[float]
    groups: list[tuple[Any, ...]]
    experts: int
    optimizers: int


def go_on(argv: Sequence[str], again: str, switches: Mapping[str, Any]) -> Resumed:
    """Run the job, and write what it has loaded to the folder ``again`` before the first step."""
    if example_job.EXAMPLES not in sys.path:
        sys.path.insert(0, example_job.EXAMPLES)
    from dsa_job import checkpoint

    load = checkpoint.load
    found: dict[str, Any] = {}

    def load_and_save(args: Any, folder: Path, model: Any, optimizer: Any, scheduler: Any) -> Any:
        progress = load(args, folder, model, optimizer, scheduler)
        parts = [each.optimizer for each in optimizer.chained_optimizers]
        found["counts"] = _counts(parts)
        found["groups"] = [_facts(group) for part in parts for group in part.param_groups if group["params"]]
        parameters = [each for chunk in model for each in chunk.parameters()]
        found["experts"] = sum(not getattr(each, "allreduce", True) for each in parameters)
        found["optimizers"] = len(parts)
        checkpoint.save(args, Path(again), progress, model, optimizer, scheduler)
        return progress

    with mock.patch.object(checkpoint, "load", load_and_save):
        outcome = example_job.train(argv, switches=switches)
    losses = [(each["lm_loss"], each["grad_norm"]) for each in outcome.records]
    return Resumed(losses, **found)


def _counts(parts: Sequence[Any]) -> set[float]:
    return {float(state["step"]) for part in parts for state in part.state.values()}


def _facts(group: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("is_expert_parallel", "wd_mult", "weight_decay", "lr", "betas", "eps")
    return tuple(group[name] for name in names)


def contents(checkpoints: Sequence[tuple[str, int]]) -> list[tuple[dict[str, torch.Tensor], set[float]]]:
    """Tensors by name, and the steps that the optimizers have counted, of distributed checkpoints."""
    from megatron.core import dist_checkpointing

    found = []
    for (folder, step), tensors in zip(checkpoints, example_job.read(checkpoints), strict=True):
        common = dist_checkpointing.load_common_state_dict(str(Path(folder) / f"iter_{step:07d}"))
        found.append((tensors, set(_saved_counts(common["optimizer"]))))
    return found


def _saved_counts(state: Any) -> Any:
    if isinstance(state, dict):
        for name, value in state.items():
            if name in ("step", "common_step"):
                yield float(value)
            else:
                yield from _saved_counts(value)
    elif isinstance(state, list):
        for each in state:
            yield from _saved_counts(each)
