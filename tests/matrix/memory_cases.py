"""Memory features on any release: whole steps, and what the features did; runs inside the pool's workers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np

from mindspeed_dsa.platforms.cpu import CpuPlatform
from tests.matrix import model as tiny
from tests.matrix.record import at_work
from tests.support import memory_events, optimizer_job


def optimizer_steps(
    folders: Mapping[str, str] | None = None, early: bool = False, **arguments: Any
) -> dict[str, Any]:
    """As :func:`optimizer_job.train` with the model of any release, and what was counted.

    Args:
        folders: where to ``load`` a checkpoint from and ``save`` one to, in the format of the release.
        early: load and gather as early as where that goes on beside other work.
        arguments: for that function.
    """
    for name, folder in (folders or {}).items():
        arguments[name] = (_format(), folder)
    with (
        mock.patch.object(optimizer_job, "config", _config),
        mock.patch.object(optimizer_job, "gpt_model", tiny.gpt_model),
        mock.patch.object(CpuPlatform, "asynchronous", early),
        # Megatron-core 0.12 saves shards of tensors with a function that numpy 2 does not have any more.
        mock.patch.object(np, "product", np.prod, create=True),
        memory_events.counted() as counts,
        _gathers() as gathers,
    ):
        result = optimizer_job.train(**arguments)
    return {**result, "counts": dict(counts), "gathered": len(gathers), "at work": at_work()}


@contextlib.contextmanager
def _gathers() -> Iterator[list[Any]]:
    """The parts of buckets that Megatron has gathered."""
    from megatron.core.distributed import param_and_grad_buffer

    found: list[Any] = []
    gather = param_and_grad_buffer.dist_all_gather_func

    def counting(output: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(output.shape)
        return gather(output, *args, **kwargs)

    with mock.patch.object(param_and_grad_buffer, "dist_all_gather_func", counting):
        yield found


def layer_step(switches: Mapping[str, Any], **arguments: Any) -> dict[str, Any]:
    """As :func:`tiny.one_step`, and what was counted."""
    with mock.patch.object(tiny, "config", _config), memory_events.counted() as counts:
        result = tiny.one_step(switches, **arguments)
    return {**result, "counts": dict(counts), "at work": at_work()}


def _format() -> str:
    """Of the distributed optimizer's state: what does not depend on the number of ranks."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    newer = getattr(DistributedOptimizer, "checkpoint_fully_reshardable_formats", ())
    return "fully_reshardable" if "fully_reshardable" in newer else "fully_sharded_model_space"


_config_of_release = tiny.config


def _config(**overrides: Any) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    fields = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    local = {"transformer_impl": "local"} if "transformer_impl" in fields else {}
    # RMSNorm is several operations on a CPU: recomputed, its gradient is rounded differently.
    values = {**tiny.EXPERTS, "normalization": "LayerNorm", **local, **overrides}
    return _config_of_release(**values)
