"""Sharded weights are gathered before a segment is recomputed ahead of its output gradient."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from mindspeed_dsa.features.data_parallel.fsdp2 import shards
from tests.support import model
from tests.support.contexts import running

CASES = "tests.features.data_parallel.fsdp2.test_recompute_ahead"
MICROBATCHES = 4
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DROPOUT = {"hidden_dropout": 0.1}


def selective(*modules: str) -> dict[str, Any]:
    """Return arguments that recompute these modules in every layer."""
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


# -- functions that run in the pool's workers ------------------------------------------------------


def step(
    switches: dict[str, Any], overrides: dict[str, Any], vpp: int | None = None, ep: int = 1
) -> dict[str, Any]:
    """Return losses and this rank's gradient shards of a PP2 step, and its counts."""
    model.start({"use_torch_fsdp2": True, **switches}, pp=2, vpp=vpp, ep=ep)
    from megatron.core.distributed import (
        TorchFullyShardedDataParallel,
        TorchFullyShardedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from mindspeed_dsa.features.pipeline import waiting_gradients
    from mindspeed_dsa.features.pipeline.recompute_ahead.ahead import Ahead

    cfg = model.config(
        num_layers=4,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ep,
        **overrides,
    )
    chunks = [model.gpt_model(cfg, vp_stage=stage if vpp else None) for stage in range(vpp or 1)]
    config = TorchFullyShardedDataParallelConfig()
    wrapped = [TorchFullyShardedDataParallel(cfg, config, chunk) for chunk in chunks]
    cfg.finalize_model_grads_func = finalize_model_grads
    gathers: Counter[str] = Counter()
    gather = _fsdp_param_group.foreach_all_gather

    def gathered(parameters: Any, *args: Any) -> Any:
        gathers[parameters[0]._param_fqn.partition(".")[0]] += 1
        most.append(sum(group.is_unsharded for chunk in wrapped for group in shards._groups(chunk.module)))
        return gather(parameters, *args)

    most: list[int] = []
    take, waited = waiting_gradients._taken_out, []

    def taken(queue: Any) -> Any:
        waited.append(queue[0].weight)
        return take(queue)

    batch = list(model.samples(MICROBATCHES).view(MICROBATCHES, 1, -1))
    with (
        mock.patch.object(_fsdp_param_group, "foreach_all_gather", gathered),
        mock.patch.object(waiting_gradients, "_taken_out", taken),
    ):
        losses = get_forward_backward_func()(
            forward_step_func=lambda *args, **kwargs: model._forward_step_of(cfg, *args, **kwargs),
            data_iterator=[iter(batch) for _ in wrapped] if vpp else iter(batch),
            model=wrapped if vpp else wrapped[0],
            num_microbatches=MICROBATCHES,
            seq_length=model.SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
    context = running("recompute-ahead")
    return {
        "losses": [float(loss["lm loss"]) for loss in losses],
        "gradients": [gradient for chunk in wrapped for gradient in shards.sharded_gradients(chunk.module)],
        "gathers": sum(gathers.values()),
        "gathered at once": max(most),
        "waited": len(waited),
        "recomputed": context.state(Ahead).recomputed if context else None,
    }


# -- tests -----------------------------------------------------------------------------------------

RUNS = {
    # name: model, chunks, EP size, switches of both runs, segments recomputed ahead per stage (in bubbles, in
    # advance)
    "layers": ({**FULL, **DROPOUT}, None, 1, {}, [(4, 0), (8, 0)]),
    "layers, a chunk each": (FULL, 2, 1, {}, [(5, 2), (8, 4)]),
    "experts": (selective("moe"), None, 1, {"fsdp2_prefetch": 2}, [(2, 0), (4, 0)]),
    "sharded experts": (selective("moe"), None, 1, {"fsdp2_shard_experts": True}, [(2, 0), (4, 0)]),
    "pairs, layers": (FULL, 2, 2, {"moe_fb_overlap": True}, [(6, 2), (8, 4)]),
    "pairs, experts": (selective("moe"), 2, 2, {"moe_fb_overlap": True}, [(3, 2), (4, 4)]),
}
QUICK = ("experts",)


@pytest.mark.parametrize(
    "name", [each if each in QUICK else pytest.param(each, marks=pytest.mark.full) for each in RUNS]
)
def test_the_bits_of_recomputation_in_place(pool, name):
    overrides, vpp, ep, others, expected = RUNS[name]
    flags = ("", "recompute_in_bubble", "recompute_in_advance")
    place, *ahead = (
        pool.run(
            f"{CASES}:step",
            4,
            switches={**others, **({flag: True} if flag else {})},
            overrides=overrides,
            vpp=vpp,
            ep=ep,
        )
        for flag in flags
    )
    for ranks, counts in zip(ahead, expected, strict=True):
        for rank, (before, after) in enumerate(zip(place, ranks, strict=True)):
            assert after["losses"] == before["losses"]
            assert len(after["gradients"]) == len(before["gradients"]) > 0
            assert all(map(torch.equal, after["gradients"], before["gradients"]))
            assert after["recomputed"]["ahead"] == counts[rank // 2]
            # Only the segments' own layer is gathered, not its neighbour.
            assert after["gathers"] <= before["gathers"] + counts[rank // 2]
            assert after["gathered at once"] <= before["gathered at once"] + 1
