"""Steps before and after the layout that ``plan --search --expert-load`` finds for a job with one hot layer.

All tokens of layer 5 go to one expert; all other layers are balanced. The job is real: Megatron's model,
router, dispatcher and schedule on four pipeline ranks with four expert parallel ranks each. Its devices are
not: a matrix product takes the time of its FLOPs at a fixed rate, and sleeps for what its tiny product leaves
of that time. So sixteen ranks share a few cores, and hardly wait for each other's computation. Attention's
core and all other operators take no time beside their own.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.linkbed import LinkBed
from benchmarks.moe.problem import deviation, timed
from benchmarks.pipeline import dense_steps
from benchmarks.pipeline.dense_steps import VOCABULARY, pipeline_step
from benchmarks.pipeline.dualpipev import of_all_ranks
from benchmarks.registry import Metrics
from mindspeed_dsa.tools.planner import arguments, relayout
from mindspeed_dsa.tools.planner.devices import Device, device

PIPELINE, EXPERT_RANKS, EXPERTS, HOT = 4, 4, 8, 5
TODAY, DEALT = "today", "dealt"
BOUND = 0.1
"""Largest relative difference of a measured step from the planned one."""
CERTAIN = 5.0
"""Logit of the chosen expert: above all others, and its router still learns."""


@dataclass(frozen=True)
class Sizes(dense_steps.Sizes):
    """Sizes of the measurement.

    Attributes:
        ffn: width of an expert.
        seconds: time of forward and backward of a layer with balanced experts.
    """

    layers: int = 12
    microbatches: int = 8
    tokens: int = 64
    hidden: int = 64
    rounds: int = 5
    ffn: int = 512
    seconds: float = 1.5

    @property
    def rate(self) -> float:
        """FLOP/s of the sleeping devices."""
        # Attention's four products and a gated expert's three, all with two gradients.
        return 6.0 * self.tokens * (4 * self.hidden**2 + 3 * self.hidden * self.ffn) / self.seconds


QUICK = Sizes(microbatches=4, tokens=8, hidden=32, rounds=1, ffn=256, seconds=0.004)


def run(link: str, quick: bool) -> Metrics:
    """Return the cell's entries."""
    sizes = QUICK if quick else Sizes()
    cores = sorted(os.sched_getaffinity(0))
    ranks = PIPELINE * EXPERT_RANKS
    with (
        tempfile.TemporaryDirectory(prefix="loads-") as folder,
        LinkBed(ranks, None, [cores[rank % len(cores)] for rank in range(ranks)]) as bed,
    ):
        bed.run("benchmarks.pipeline.loads:record", sizes=sizes, folder=folder)
        dealt = planned(sizes, Path(folder))
        layout = "|".join(dealt.after.job.layout.stages)
        found = bed.run("benchmarks.pipeline.loads:measure", timeout_s=3600, sizes=sizes, layout=layout)[0]
    figures = {
        **metrics(found, {TODAY: dealt.before.time.total, DEALT: dealt.after.time.total}),
        "layers": [stage.count("t") for stage in dealt.after.job.layout.stages],
    }
    print(f"loads: {figures}", file=sys.stderr, flush=True)
    return {"loads": figures}


def planned(sizes: Sizes, folder: Path) -> relayout.Dealt:
    """Return what ``plan --search --expert-load`` finds for the job, from its records."""
    words = (
        f"pretrain_gpt.py --num-layers {sizes.layers} --hidden-size {sizes.hidden} --num-attention-heads 8 "
        f"--ffn-hidden-size {4 * sizes.hidden} --seq-length {sizes.tokens} --micro-batch-size 1 "
        f"--global-batch-size {sizes.microbatches * EXPERT_RANKS} --padded-vocab-size {VOCABULARY} --swiglu "
        f"--disable-bias-linear --normalization RMSNorm --position-embedding-type rope --num-experts 8 "
        f"--moe-ffn-hidden-size {sizes.ffn} --moe-router-topk 1 --moe-token-dispatcher-type alltoall "
        f"--pipeline-model-parallel-size {PIPELINE} --expert-model-parallel-size {EXPERT_RANKS} "
        "--transformer-impl local --untie-embeddings-and-output-weights"
    )
    job = arguments.job_of(words.split(), PIPELINE * EXPERT_RANKS, expert_load=folder)
    return relayout.deal(job, sleeping(sizes), "0.16.1")


def sleeping(sizes: Sizes) -> Device:
    """Return the planner's description of the sleeping devices: products take time, nothing else does."""
    none = 1e9
    own = {"tflops": sizes.rate / 1e12, "matmul": 1.0, "attention": none}
    return replace(device("cpu", hbm=none, link=none, network=none, host=none, **own), name="sleeping")


def metrics(found: Mapping[str, Any], planned: Mapping[str, float]) -> Metrics:
    """Return medians, all turns, and both beside the planned times.

    Args:
        found: result of :func:`measure`.
        planned: planned seconds of a step, by layout.
    """
    turns: Mapping[str, Sequence[float]] = found["seconds"]
    median = {name: statistics.median(each) for name, each in turns.items()}
    over = {name: median[name] / planned[name] for name in median}
    return {
        "speedup": median[TODAY] / median[DEALT],
        "speedup_range": sorted(a / b for a, b in zip(turns[TODAY], turns[DEALT], strict=True)),
        "speedup_planned": planned[TODAY] / planned[DEALT],
        "seconds": {name: sorted(each) for name, each in turns.items()},
        "seconds_median": median,
        "seconds_planned": dict(planned),
        "measured_over_planned": over,
        "bound": BOUND,
        "is_within_bound": all(abs(each - 1) <= BOUND for each in over.values()),
        "processor_share": found["processor_share"],
        "losses_are_equal": found["losses_are_equal"],
        "deviation": found["deviation"],
    }


# -- functions that run on the ranks ---------------------------------------------------------------


def record(sizes: Sizes, folder: str) -> None:
    """Run a step in today's split, and write its record of loads."""
    import mindspeed_dsa
    from mindspeed_dsa.features.moe.load_report import steps
    from mindspeed_dsa.session import current

    mindspeed_dsa.enable(moe_router_load_report=folder)
    session = current()
    assert session is not None
    context = session.contexts["moe-router-load-report"]
    steps.use_own_loop(context)
    _start()
    _step(sizes, None)(_routed())
    steps.record_step(context, 1)


def measure(sizes: Sizes, layout: str) -> dict[str, Any]:
    """Return seconds of all turns of both layouts, the same on all ranks, and the deviation of results.

    Args:
        sizes: sizes of the model and the batch.
        layout: new ``pipeline_model_parallel_layout``.
    """
    import mindspeed_dsa

    mindspeed_dsa.enable()
    _start()
    runs = {TODAY: _step(sizes, None), DEALT: _step(sizes, layout)}
    # Each layout's first step is not timed: it opens connections, and shows the results.
    results = {name: of_all_ranks(run(_routed())) for name, run in runs.items()}
    losses = [name for name in results[TODAY] if " loss " in name]
    equal = all(torch.equal(results[TODAY][name], results[DEALT][name]) for name in losses)
    # Experts without tokens have gradients of 0 in both layouts.
    used = {name: value for name, value in results[TODAY].items() if value.norm() > 0}
    deviates = deviation(results[DEALT], used)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    shares = []
    for turn in range(sizes.rounds):
        # Turns begin with the other layout in turn.
        for name in sorted(runs, reverse=bool(turn % 2)):
            timing = timed(lambda name=name: runs[name](_on_sleeping(sizes)))
            seconds[name].append(timing.wall)
            shares.append(timing.processor / timing.wall)
    return {
        "seconds": seconds,
        "processor_share": max(shares),
        "losses_are_equal": bool(losses) and equal,
        "deviation": deviates,
    }


def _start() -> None:
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=PIPELINE,
        expert_model_parallel_size=EXPERT_RANKS,
        expert_tensor_parallel_size=1,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def _step(sizes: Sizes, layout: str | None) -> dense_steps.Step:
    return pipeline_step(
        1,
        sizes,
        {
            "num_moe_experts": EXPERTS,
            "moe_router_topk": 1,
            "moe_router_pre_softmax": True,
            "moe_ffn_hidden_size": sizes.ffn,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "expert_model_parallel_size": EXPERT_RANKS,
            "pipeline_model_parallel_layout": layout,
        },
    )


@contextlib.contextmanager
def _routed() -> Iterator[None]:
    """Send the hot layer's tokens to its first expert, and other layers' tokens to all experts in turn."""
    from megatron.core.transformer.moe.router import TopKRouter

    original = TopKRouter.gating

    def gating(self: Any, hidden: Tensor) -> Tensor:
        logits = original(self, hidden)
        rows = torch.arange(logits[..., 0].numel()).view(logits.shape[:-1])
        chosen = torch.zeros_like(rows) if self.layer_number == HOT else rows % EXPERTS
        return logits + CERTAIN * torch.nn.functional.one_hot(chosen, EXPERTS)

    with mock.patch.object(TopKRouter, "gating", gating):
        yield


@contextlib.contextmanager
def _on_sleeping(sizes: Sizes) -> Iterator[None]:
    """Let products of linear layers take the time of their FLOPs on a sleeping device."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    def asleep(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: Any, rows: Tensor, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            output, bias = original(self, rows, *args, **kwargs)
            seconds = 2.0 * rows.numel() * output.size(-1) / sizes.rate
            _sleep(began + seconds)
            # Gradients of the input and of the weight.
            return _Busy.apply(output, 2 * seconds), bias

        return forward

    with contextlib.ExitStack() as stack:
        for layer in (ColumnParallelLinear, RowParallelLinear):
            stack.enter_context(mock.patch.object(layer, "forward", asleep(layer.forward)))
        stack.enter_context(_routed())
        yield


def _sleep(until: float) -> None:
    if (left := until - time.perf_counter()) > 0:
        time.sleep(left)


class _Busy(torch.autograd.Function):
    """Identity whose backward takes some seconds."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return output.clone()  # the loss changes its logits in place, which views of an input forbid

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _sleep(time.perf_counter() + ctx.seconds)
        return gradient, None
