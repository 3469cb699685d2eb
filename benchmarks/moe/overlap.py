"""All-to-alls under the shared expert and the experts' weight gradients: the hidden fraction."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.linkbed import LinkBed
from benchmarks.moe.problem import QUICK, Sizes, Timing, deviation, layer, minima, start, step_of, summary
from benchmarks.registry import Metrics

SWITCH = {"moe_alltoall_overlap_comm": True}
SIZES = Sizes(rounds=15)
TRANSFERS = ("dispatch", "combine", "combine backward", "dispatch backward")
WORK = {
    "dispatch": ("shared fc1",),
    "combine": ("shared fc2",),
    "combine backward": ("shared fc2 backward", "shared fc1 backward"),
    "dispatch backward": ("expert weight gradients",),
}
"""Work placed under each transfer."""


def run(link: str, quick: bool) -> Metrics:
    """Return the cell's entries."""
    with LinkBed(2, link) as bed:
        found = bed.run("benchmarks.moe.overlap:measure", sizes=QUICK if quick else SIZES)[0]
    print(f"overlap: {found}", file=sys.stderr, flush=True)
    return metrics(found)


def metrics(found: Mapping[str, Any]) -> Metrics:
    """Convert measured times to ratios of medians.

    Over a link gloo's all-to-all takes one of two times, one about 1.7 times the other, depending on whether
    its two directions run at once. A step has four of them, so its least time and a transfer's least time do
    not belong together.

    Args:
        found: result of :func:`measure`.
    """
    wall = {name: 1e3 * timing.median for name, timing in found["times"].items()}
    # Of a transfer of 60 ms under 50 ms of work, 50 ms can hide.
    covered = {name: min(wall[_transfer(name)], sum(wall[work] for work in WORK[name])) for name in TRANSFERS}
    coverable = sum(covered.values())
    return {
        "a2a_hidden_fraction": (wall["stock"] - wall["overlapped"]) / coverable,
        "layer_speedup": wall["stock"] / wall["overlapped"],
        "layer_speedup_without_weight_gradients": wall["stock"] / wall["shared expert alone"],
        "transfers_over_step": sum(wall[_transfer(name)] for name in TRANSFERS) / wall["stock"],
        "coverable_milliseconds": covered,
        "overlap_milliseconds": wall,
        "overlap_milliseconds_least": {name: 1e3 * timing.wall for name, timing in found["times"].items()},
        "overlap_processor_milliseconds": {
            name: 1e3 * timing.processor for name, timing in found["times"].items()
        },
        "overlap_deviation": found["deviation"],
    }


def _transfer(name: str) -> str:
    """Return the name of a transfer's measurement; backward moves the same rows the other way."""
    return f"transfer of {name.removesuffix(' backward')}"


def measure(sizes: Sizes) -> dict[str, Any]:
    """Return times of variants, of transfers and of the work under them, the same on all ranks."""
    start(**SWITCH)
    built = layer(sizes)
    step = step_of(built, sizes)
    with way("stock"):
        expected = step()
    worst = 0.0
    for name in ("overlapped", "shared expert alone"):
        with way(name):
            worst = max(worst, deviation(step(), expected))

    def variant(name: str) -> Callable[[], object]:
        def work() -> None:
            with way(name):
                step()

        return work

    names = ("stock", "overlapped", "shared expert alone", "no transfers")
    works = {name: variant(name) for name in names}
    return {
        "times": {
            **minima({**works, **_transfers(built, sizes)}, sizes.rounds),
            **_work(built, sizes),
        },
        "deviation": worst,
    }


@contextlib.contextmanager
def way(name: str) -> Iterator[None]:
    """Run the layer's variant in the block.

    ``stock``; ``overlapped`` as shipped; ``shared expert alone`` with weight gradients where stock has them;
    ``no transfers``, stock with a copy in place of every all-to-all, so that its rows are wrong.
    """
    from mindspeed_dsa.features.moe.alltoall_overlap import layer as feature
    from mindspeed_dsa.parallel.weight_gradients import defer_gradients

    with contextlib.ExitStack() as stack:
        if name in ("stock", "no transfers"):
            stack.enter_context(mock.patch.object(feature, "is_served", return_value=False))
        if name == "shared expert alone":
            stack.enter_context(
                mock.patch.object(feature, "defer_gradients", side_effect=lambda weights: defer_gradients(()))
            )
        if name == "no transfers":
            stack.enter_context(mock.patch.object(dist, "all_to_all_single", copy_rows))
        yield


def copy_rows(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> None:
    """Copy as many rows as fit, without a transfer, in place of ``all_to_all_single``."""
    # Splits differ between ranks, so both sides need not have the same number of rows.
    rows = min(len(output), len(input))
    output[:rows].copy_(input[:rows])
    output[rows:].zero_()


def _transfers(built: Any, sizes: Sizes) -> dict[str, Callable[[], object]]:
    """Return each all-to-all by itself, with the splits of the last forward."""
    dispatcher, group = built.token_dispatcher, built.token_dispatcher.ep_group
    sent, received = ([int(n) for n in each] for each in (dispatcher.input_splits, dispatcher.output_splits))
    tokens, probs = torch.randn(sum(sent), sizes.hidden), torch.randn(sum(sent))
    arrived = torch.randn(sum(received), sizes.hidden)

    def dispatch() -> None:
        works = []
        for rows in (tokens, probs):
            result = rows.new_empty((sum(received), *rows.shape[1:]))
            works.append(dist.all_to_all_single(result, rows, received, sent, group=group, async_op=True))
        for work in works:
            work.wait()

    def combine() -> None:
        dist.all_to_all_single(torch.empty_like(tokens), arrived, sent, received, group=group)

    return {"transfer of dispatch": dispatch, "transfer of combine": combine}


def _work(built: Any, sizes: Sizes) -> dict[str, Timing]:
    """Time the work placed under transfers, without the transfers."""
    marks: list[tuple[float, float]] = []

    def mark(*_: Any) -> None:
        marks.append((time.perf_counter(), time.process_time()))

    def between(module: Any, inputs: tuple[Tensor, ...]) -> None:
        mark()
        inputs[0].register_hook(mark)

    shared = built.shared_experts
    hook = shared.linear_fc2.register_forward_pre_hook(between)
    products = _weight_gradients(built, sizes)
    names = [name for works in WORK.values() for name in works]
    timings: dict[str, list[Timing]] = {name: [] for name in names}
    for _ in range(sizes.rounds):
        marks.clear()
        rows = torch.randn(sizes.tokens, 1, sizes.hidden, requires_grad=True)
        grad = torch.randn_like(rows)
        dist.barrier()
        mark()  # the hook marks before fc2, too
        output = shared(rows)
        mark()
        output.backward(grad)  # marks once fc2's backward is done
        mark()
        products()
        mark()
        for name, (first, last) in zip(
            ("shared fc1", "shared fc2", "shared fc2 backward", "shared fc1 backward", names[-1]),
            pairwise(marks),
            strict=True,
        ):
            timings[name].append(Timing(last[0] - first[0], last[1] - first[1]))
    hook.remove()
    return {name: summary(times) for name, times in timings.items()}


def _weight_gradients(built: Any, sizes: Sizes) -> Callable[[], None]:
    """Return the matmuls of the experts' weight gradients, for the number of rows that arrived here."""
    weights = [weight for weight in built.experts.parameters() if weight.dim() == 2]
    arrived = sum(int(n) for n in built.token_dispatcher.output_splits)
    rows = arrived // built.num_local_experts
    operands = [
        (torch.randn(rows, out), torch.randn(rows, width)) for out, width in map(Tensor.size, weights)
    ]

    def products() -> None:
        for grad, kept in operands:
            torch.mm(grad.t(), kept)

    return products
