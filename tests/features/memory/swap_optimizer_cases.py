"""What runs inside the pool's workers to look into a step whose state lies on the host."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from benchmarks.memory.measure import allocations
from mindspeed_dsa.platforms import host_pool
from mindspeed_dsa.platforms.cpu import CpuPlatform
from tests.features.memory.job import build, error_of_build, forward_backward, state, step
from tests.features.memory.training import LARGER

ON = {"swap_optimizer": True}


def order_of_events(early: bool, **options: Any) -> dict[str, Any]:
    """When loading begins, and the staging memory between steps.

    Args:
        early: as on a device that copies beside other work.
        options: of the job.
    """
    from mindspeed_dsa.features.memory.step_pipeline import Pipeline
    from mindspeed_dsa.features.memory.swap_optimizer_impl import swapped_of

    job = build(ON, **options)
    pipelines = [swapped_of(part).pipeline for part in job.parts]
    seen: list[str] = []
    phase = ["backward"]
    staging: list[int] = []
    before: list[int] = []
    load, optimizer_step = Pipeline._load, job.optimizer.step

    def watched_load(self: Any, number: int) -> None:
        seen.append(phase[0])
        load(self, number)

    def watched_step() -> Any:
        before.append(sum(pipeline.staging for pipeline in pipelines))
        phase[0] = "prepare"
        return optimizer_step()

    job.optimizer.step = watched_step
    asynchronous = mock.patch.object(CpuPlatform, "asynchronous", early)
    with mock.patch.object(Pipeline, "_load", watched_load), asynchronous:
        for number in range(4):
            phase[0] = "backward"
            step(job, number, spoil=number == 2)
            if number == 3:
                state(job)
            staging.append(sum(pipeline.staging for pipeline in pipelines))
    return {
        "parts": max(len(pipeline.chunks) for pipeline in pipelines),
        "first load": seen[0],
        "staging at rest": staging,
        "staging before the step": min(before),
        **state(job),
    }


def peaks(switches: dict[str, Any], **options: Any) -> dict[str, float]:
    """Bytes a parameter over what was there before: while the optimizer is built, and in its updates.

    Returns:
        ``construction``, ``first``, ``second``: peaks; ``largest``: share of the largest parameter.
    """
    from megatron.core import optimizer

    held: list[int] = [0]
    original = optimizer.get_megatron_optimizer

    def measured(*arguments: Any) -> Any:
        with allocations(held):
            return original(*arguments)

    with mock.patch.object(optimizer, "get_megatron_optimizer", measured):
        job = build(switches, distributed=True, **LARGER)
    sizes = [parameter.numel() for parameter in job.model.parameters()]
    updates = []
    for number in range(2):
        forward_backward(job, number)
        during = [0]
        with allocations(during):
            job.optimizer.step()
        updates.append(max(during))
    return {
        "construction": max(held) / sum(sizes),
        "first": updates[0] / sum(sizes),
        "second": updates[1] / sum(sizes),
        "largest": max(sizes) / sum(sizes),
    }


def legacy_state(switches: dict[str, Any]) -> dict[str, Any]:
    """Parameter states in the format before February 2024, read after a step."""
    job = build(switches, distributed=True)
    step(job, 0)
    for part in job.parts:
        generator = torch.Generator().manual_seed(1)
        old = {
            index: {
                torch.float32: {
                    key: [torch.rand(bucket.numel_unpadded, generator=generator) for bucket in buffer.buckets]
                    for key in ("param", "exp_avg", "exp_avg_sq")
                }
            }
            for index, buffer in enumerate(part.buffers)
        }
        part.load_parameter_state_from_dp_zero(old, update_legacy_format=True)
    loaded = state(job)
    return {"loaded": loaded, "record": step(job, 1), **state(job)}


def without_memory() -> str:
    """What building an optimizer says on a host whose memory is full."""
    with mock.patch.object(host_pool, "host_memory_free", return_value=0):
        return error_of_build(switches=ON)
