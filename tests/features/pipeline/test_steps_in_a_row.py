"""Consecutive steps of one model that reduce gradients while other gradients are still missing.

In the first step Megatron only counts the gradients of each weight, and starts reductions automatically from
the second step on. These tests compare steps with more, fewer and the fewest possible microbatches, each
after an evaluation, and a step after a failed one. The reference is the same schedule without deferred weight
gradients and without overlap, bit for bit.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.support import model

pytestmark = pytest.mark.full

COUNTS = (6, 4, 8, 4)
EVALUATED = 2
FAILED = "finalize fails, as it does of gradients that are not finite"


def fail(*_: Any, **__: Any) -> None:
    """Stand-in for a gradient check that ends a step."""
    raise RuntimeError(FAILED)


def steps(switches: dict[str, Any], vpp: int | None, ep: int, overlap: bool, aligned: bool) -> Any:
    """Return the reduced gradients of each step by global name.

    Args:
        switches: feature switches.
        vpp: number of chunks on each of two pipeline ranks.
        ep: expert parallel size.
        overlap: whether gradients are reduced during backward.
        aligned: whether all stages start reductions together, where the schedule says so.
    """
    model.start(switches, pp=2, vpp=vpp, ep=ep)
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func

    cfg = model.config(
        num_layers=4,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ep,
    )
    how = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, bucket_size=2000 if overlap else None
    )
    parts = [model.gpt_model(cfg, vp_stage=stage if vpp else None) for stage in range(vpp or 1)]
    chunks = [DistributedDataParallel(cfg, how, part) for part in parts]
    if overlap:
        cfg.no_sync_func = [chunk.no_sync for chunk in chunks] if vpp else chunks[0].no_sync
    if aligned:
        starts = [chunk.start_grad_sync for chunk in chunks]
        cfg.grad_sync_func = starts if vpp else starts[0]
    # Data parallel ranks take turns at the samples.
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()

    def play(count: int, forward_only: bool = False) -> None:
        batches = list(model.samples(count * ranks).view(count, ranks, 1, -1)[:, rank])
        data = [iter(batches) for _ in chunks]
        get_forward_backward_func()(
            forward_step_func=partial(model._forward_step_of, cfg),
            data_iterator=data if vpp else data[0],
            model=chunks if vpp else chunks[0],
            num_microbatches=count,
            seq_length=model.SEQUENCE,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def zero() -> None:
        for chunk in chunks:
            chunk.zero_grad_buffer()

    if not overlap:  # with overlap, Megatron requires that every started reduction is finished
        cfg.finalize_model_grads_func = fail
        with pytest.raises(RuntimeError, match=FAILED):
            play(COUNTS[0])
        assert cfg.finalize_model_grads_func is fail
    cfg.finalize_model_grads_func = finalize_model_grads
    gradients_of_steps = []
    for count in COUNTS:
        # An evaluation must not change the counts of gradients.
        with torch.no_grad():
            play(EVALUATED, forward_only=True)
        zero()
        play(count)
        gradients_of_steps.append(model.gradients(parts))
    return gradients_of_steps


V = {"schedules_method": "dualpipev"}
DETACHED = {**V, "dualpipev_dw_detach": True}
SPLIT = {"split_backward": True}
PAIRS = {"moe_fb_overlap": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int | None, int]] = {
    # name: switches, switches of the reference, chunks, expert parallel size
    "V": (V, V, 2, 1),
    "V, weight gradients later": (DETACHED, V, 2, 1),
    "V of pairs, weight gradients later": ({**DETACHED, **PAIRS}, {**V, **PAIRS}, 2, 2),
    "1F1B, split": (SPLIT, {}, None, 1),
    "interleaved, split": (SPLIT, {}, 2, 1),
    "interleaved pairs, split": ({**SPLIT, **PAIRS}, PAIRS, 2, 2),
}
REDUCED = ("at the end", "with each bucket's last gradient", "on all stages together")


@pytest.mark.parametrize("reduced", REDUCED)
@pytest.mark.parametrize("name", CASES)
def test_every_step_has_the_same_bits(pool, name, reduced):
    switches, reference, vpp, ep = CASES[name]
    run = partial(pool.run, f"{__name__}:steps", 4, vpp=vpp, ep=ep)
    expected = run(switches=reference, overlap=False, aligned=False)
    overlap, aligned = reduced != "at the end", "stages" in reduced
    found = run(switches=switches, overlap=overlap, aligned=aligned)
    for mine, theirs in zip(found, expected, strict=True):
        assert len(mine) == len(theirs) == len(COUNTS)
        for step, (gradients, whole) in enumerate(zip(mine, theirs, strict=True)):
            different = [key for key, gradient in whole.items() if not gradients[key].equal(gradient)]
            assert different == [], (step, different)
