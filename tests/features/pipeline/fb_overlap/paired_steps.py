"""Worker functions: training steps with paired forwards and backwards."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from mindspeed_dsa.parallel.all_to_all import InFlight
from tests.support import memory_events, model, moe, optimizer_job

SWITCH = {"moe_fb_overlap": True}


def trained(**arguments: Any) -> dict[str, Any]:
    """Run a training step of the tiny model; also return split transfers and memory feature events."""
    with (
        moe.transfers() as events,
        memory_events.counted() as counts,
        mock.patch.object(model, "gpt_model", with_prediction(model.gpt_model)),
    ):
        result = model.run(**arguments)
    return {**result, "events": list(events), "counts": dict(counts)}


def with_prediction(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a model builder to put multi-token prediction into the last chunk, if the config has it."""

    def gpt_model(cfg: Any, vp_stage: int | None = None) -> Any:
        from megatron.core import parallel_state

        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        return build(cfg, vp_stage, mtp=last and bool(cfg.mtp_num_layers))

    return gpt_model


def order(**overrides: Any) -> list[str]:
    """Return the events of two microbatches through one layer: transfers, forwards, weight gradients."""
    model.start(SWITCH, ep=2, etp=1)
    cfg = model.config(num_layers=1, moe_layer_freq=[1], expert_model_parallel_size=2, **overrides)
    chunk = model.gpt_model(cfg)
    layer = chunk.decoder.layers[0]
    shared, expert = layer.mlp.shared_experts, layer.mlp.experts.local_experts[0]
    modules = {"attention": layer.self_attention, "experts": layer.mlp.experts}
    weights = {"attention": layer.self_attention.linear_proj, "experts": expert.linear_fc1}
    if shared is not None:
        halves = {"shared fc1": shared.linear_fc1, "shared fc2": shared.linear_fc2}
        modules, weights = modules | halves, weights | halves
    with moe.transfers() as events:
        for name, module in modules.items():
            module.register_forward_hook(partial(_happened, events, name))
        for name, module in weights.items():
            module.weight.register_post_accumulate_grad_hook(partial(_happened, events, f"{name} dW"))
        model.train_step(cfg, [chunk], list(model.samples(2).view(2, 1, -1)))
    return events


def _happened(events: list[str], name: str, *_: Any) -> None:
    events.append(name)


def buffers_alive(
    microbatches: int,
    layers: int = 2,
    switches: Mapping[str, Any] | None = None,
    recomputed: Mapping[str, Any] | None = None,
    **layout: int,
) -> dict[str, int]:
    """Return the maximum number of live receive buffers in a step, and the number left after it."""
    # Without collections, because buffers must be freed by reference counting.
    gc.collect()
    gc.disable()
    try:
        with _buffers() as (alive, counts):
            model.run(
                {**SWITCH, **(switches or {})},
                {"num_moe_experts": 2, "num_layers": layers, **(recomputed or {})},
                num_microbatches=microbatches,
                micro_batch_size=1,
                ep=2,
                etp=1,
                **layout,
            )
            return {"most": max(counts), "left": len(alive)}
    finally:
        gc.enable()


@contextlib.contextmanager
def _buffers() -> Iterator[tuple[dict[int, Any], list[int]]]:
    alive: dict[int, Any] = {}
    counts: list[int] = []
    send = InFlight.send

    def launch(self: Any, rows: Any, reverse: bool = False) -> Any:
        pending = send(self, rows, reverse)
        # Finalizers tell when a buffer is freed, without a reference to it.
        key = len(counts)
        alive[key] = weakref.finalize(pending.result, alive.pop, key)
        counts.append(len(alive))
        return pending

    with mock.patch.object(InFlight, "send", launch):
        yield alive, counts


def optimized(**arguments: Any) -> dict[str, Any]:
    """Take a few steps with an optimizer; also return memory feature events."""
    with memory_events.counted() as counts:
        result = optimizer_job.train(ep=2, **arguments)
    return {**result, "counts": dict(counts)}


def three_steps(
    distributed: bool, switches: Mapping[str, Any] | None = None, **overrides: Any
) -> dict[str, Any]:
    """Take steps with overlapped reduction, and an evaluation, stock and ours."""
    import mindspeed_dsa

    model.start(ep=dist.get_world_size(), etp=1)
    theirs = _steps(distributed, **overrides)
    mindspeed_dsa.disable()
    mindspeed_dsa.enable(**model.DSA_ON, **SWITCH, **(switches or {}))
    with moe.transfers() as events, memory_events.counted() as counts:
        ours = _steps(distributed, **overrides)
    return {"counts": dict(counts), "ours": ours, "theirs": theirs, "launched": events.count("launch")}


def evaluated() -> dict[str, Any]:
    """Return the losses of a forward-only pass of PP2 x VPP2, stock and ours."""
    import mindspeed_dsa

    model.start(pp=2, vpp=2, ep=2, etp=1)
    theirs = _forwards()
    mindspeed_dsa.disable()
    mindspeed_dsa.enable(**model.DSA_ON, **SWITCH)
    with moe.transfers() as events:
        ours = _forwards()
    return {"ours": ours, "theirs": theirs, "launched": events.count("launch")}


def _forwards() -> list[float]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    cfg = model.config(
        num_layers=4,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        expert_model_parallel_size=2,
    )
    chunks = [model.gpt_model(cfg, vp_stage=stage) for stage in range(2)]
    batch = list(model.samples(4).view(4, 1, -1))
    with torch.no_grad():
        losses = get_forward_backward_func()(
            forward_step_func=partial(model._forward_step_of, cfg),
            data_iterator=[iter(batch) for _ in chunks],
            model=chunks,
            num_microbatches=4,
            seq_length=model.SEQUENCE,
            micro_batch_size=1,
            forward_only=True,
        )
    return [float(each["lm loss"]) for each in losses]


def _steps(distributed: bool, **overrides: Any) -> dict[str, Any]:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func

    cfg = model.config(num_layers=2, expert_model_parallel_size=dist.get_world_size(), **overrides)
    # Small buckets, so that reductions start during backward.
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        use_distributed_optimizer=distributed,
        bucket_size=4000,
    )
    chunk = model.gpt_model(cfg, mtp=bool(cfg.mtp_num_layers))
    wrapped = DistributedDataParallel(cfg, ddp, chunk)
    cfg.finalize_model_grads_func, cfg.no_sync_func = finalize_model_grads, wrapped.no_sync
    gradients, losses = {}, []
    for step in range(4):
        wrapped.zero_grad_buffer()
        # The last step is the evaluation.
        with torch.no_grad() if step == 3 else contextlib.nullcontext():
            losses += get_forward_backward_func()(
                forward_step_func=partial(model._forward_step_of, cfg),
                data_iterator=iter(model.samples(3, seed=step).view(3, 1, -1)),
                model=wrapped,
                num_microbatches=3,
                seq_length=model.SEQUENCE,
                micro_batch_size=1,
                forward_only=step == 3,
            )
        if step < 3:
            gradients |= {f"{step} {name}": gradient for name, gradient in model.gradients([chunk]).items()}
    golden = {
        index: sorted(group.golden_per_param_grad_ready_counts.values())
        for index, group in enumerate(wrapped.bucket_groups)
    }
    return {"gradients": gradients, "losses": [float(loss["lm loss"]) for loss in losses], "golden": golden}
