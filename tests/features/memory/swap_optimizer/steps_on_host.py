"""Worker functions: inspection of optimizer steps with state on the host."""

from __future__ import annotations

import copy
import gc
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks.memory.measure import allocations
from mindspeed_dsa.optimizers.moments import MOMENTS
from mindspeed_dsa.platforms import host_pool
from mindspeed_dsa.platforms.cpu import CpuPlatform
from tests.support.optimizer_job import build, forward_backward, state, step
from tests.support.optimizer_training import LARGER

ON = {"swap_optimizer": True}


def pipeline_of(part: Any) -> Any:
    """Return the step pipeline of one of Megatron's optimizers."""
    from mindspeed_dsa.megatron.optimizer import state_of

    return state_of(part, "swap-optimizer").pipeline


def order_of_events(early: bool, **options: Any) -> dict[str, Any]:
    """Return when loading and gathering start, and the staging memory between steps.

    Args:
        early: whether the device copies asynchronously.
        options: options of the job.
    """
    from megatron.core.distributed import param_and_grad_buffer

    from mindspeed_dsa.optimizers.step_pipeline import Pipeline

    job = build(ON, **options)
    pipelines = [pipeline_of(part) for part in job.parts]
    events: list[str] = []
    staging: list[tuple[int, int]] = []
    all_gather = param_and_grad_buffer.dist_all_gather_func

    def noting(name: str, function: Any) -> Any:
        def noted(*arguments: Any, **keywords: Any) -> Any:
            events.append(name)
            return function(*arguments, **keywords)

        return noted

    def held() -> int:
        return sum(pipeline.staging for pipeline in pipelines)

    with (
        mock.patch.object(CpuPlatform, "asynchronous", early),
        mock.patch.object(Pipeline, "_load", noting("load", Pipeline._load)),
        mock.patch.object(Pipeline, "_update", noting("update", Pipeline._update)),
        mock.patch.object(param_and_grad_buffer, "dist_all_gather_func", noting("gather", all_gather)),
    ):
        for number in range(4):
            events.clear()
            forward_backward(job, number)
            events.append("gradients")
            before = held()
            # An infinite gradient makes Megatron skip the third step.
            if number == 2:
                next(job.model.parameters()).main_grad.fill_(float("inf"))
            job.optimizer.step()
            staging.append((before, held()))
    step_events = events[events.index("gradients") :]
    # Index after the last update.
    last = len(step_events) - step_events[::-1].index("update")
    return {
        "parts": max(len(pipeline.chunks) for pipeline in pipelines),
        "first load": "backward" if events.index("load") < events.index("gradients") else "step",
        "staging": staging,
        "gathered before the last update": step_events[:last].count("gather"),
        "gathered": step_events.count("gather"),
        **state(job),
    }


def changed_while_loaded(early: bool) -> dict[str, Any]:
    """Set master weights from outside while the first parts of a step are already loaded."""
    job = build(ON, distributed=True)
    with mock.patch.object(CpuPlatform, "asynchronous", early):
        forward_backward(job, 0)
        loaded = sum(pipeline_of(part).staging for part in job.parts)
        # Stale copies in the staging buffers have to be dropped.
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.mul_(2)
        job.optimizer.reload_model_params()
        job.optimizer.step()
    return {"loaded": loaded > 0, **state(job)}


def offloaded_by_verl(offloads: bool, early: bool) -> dict[str, Any]:
    """Take steps, and between them what verl's ``optimizer_offload`` does with Megatron's optimizers."""
    job = build(ON, distributed=True)
    with mock.patch.object(CpuPlatform, "asynchronous", early):
        for number in range(3):
            step(job, number)
            for part in job.parts if offloads else ():
                for each in part.optimizer.state.values():
                    each |= {key: each[key].clone() for key in MOMENTS}
                for main in (main for group in part.shard_fp32_from_float16_groups for main in group):
                    main.data = main.data.clone()
        step(job, 3)
    masters = [main for part in job.parts for group in part.shard_fp32_from_float16_groups for main in group]
    return {"memory": sum(main.untyped_storage().nbytes() for main in masters), **state(job)}


def loading_fails(error: type[Exception] | None, **options: Any) -> dict[str, Any]:
    """Take two steps; the second one's first early load copies one part, then raises ``error`` if given."""
    from mindspeed_dsa.optimizers import step_pipeline

    job = build(ON, **options)
    original, calls = step_pipeline._copy, []
    raised = ""

    def fails_once(*tensors: Any) -> None:
        calls.append(tensors)
        if len(calls) == 2 and error is not None:
            raise error
        original(*tensors)

    with mock.patch.object(CpuPlatform, "asynchronous", True):
        step(job, 0)
        with mock.patch.object(step_pipeline, "_copy", fails_once):
            try:
                step(job, 1)
            except Exception as found:
                raised = type(found).__name__
    return {"raised": raised, **state(job)}


def torn(**options: Any) -> dict[str, Any]:
    """Take a step that fails in its second chunk; return the refusals, and training from the state before."""
    job = build(ON, **options)
    step(job, 0)
    kept = copy.deepcopy(job.optimizer.state_dict())
    inner = job.parts[0].optimizer
    original, updates = inner.step, []

    def unlucky(*unused: Any) -> None:
        updates.append(None)
        if len(updates) == 2:
            raise ZeroDivisionError
        original()

    refused = []
    # A step that fails, a step after it, and a save after it.
    for attempt in (
        partial(step, job, 1),
        partial(step, job, 1),
        job.optimizer.state_dict,
    ):
        with mock.patch.object(inner, "step", unlucky):
            try:
                attempt()
            except (ZeroDivisionError, RuntimeError) as error:
                refused.append(f"{type(error).__name__}: {error}")
    job.optimizer.load_state_dict(kept)
    return {"refused": refused, "record": step(job, 1), **state(job)}


def second_optimizer(**options: Any) -> dict[str, int]:
    """Return host bytes with one optimizer, and with its successor for the same model."""
    from megatron.core.optimizer import get_megatron_optimizer

    gc.collect()  # frees other tests' jobs
    before = host_pool.shared.figures().in_use
    job = build(ON, **options)
    one = host_pool.shared.figures().in_use - before
    with mock.patch.object(CpuPlatform, "asynchronous", True):
        step(job, 0)
        job.optimizer = get_megatron_optimizer(job.optimizer.config, [job.model])
        gc.collect()
        step(job, 1)
    return {"one": one, "next": host_pool.shared.figures().in_use - before}


def peaks(switches: dict[str, Any], **options: Any) -> dict[str, float]:
    """Return peak bytes per parameter, while the optimizer is built and in its updates.

    Returns:
        ``construction``, ``first`` and ``second``: peaks.
        ``load``: peak while a fresh state is loaded.
        ``largest``: share of the largest parameter.
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
    state_dict = job.optimizer.state_dict()
    # As in a job that has not taken a step yet.
    for part in job.parts:
        part.optimizer.state.clear()
    loading = [0]
    with allocations(loading):
        job.optimizer.load_state_dict(state_dict)
    return {
        "load": max(loading) / sum(sizes),
        "construction": max(held) / sum(sizes),
        "first": updates[0] / sum(sizes),
        "second": updates[1] / sum(sizes),
        "largest": max(sizes) / sum(sizes),
    }
