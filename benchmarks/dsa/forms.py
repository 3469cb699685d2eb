"""Both forms of the main attention by length, and the form that ``--use-dsa-absorb auto`` selects."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.dsa.problem import Inputs, Sizes, absorbed, make_inputs, projected
from benchmarks.registry import Metrics
from mindspeed_dsa.features.dsa.main_attention import attend_densely, attend_sparsely
from mindspeed_dsa.features.dsa.operands import Operands
from mindspeed_dsa.features.dsa.problem import Rows
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer
from mindspeed_dsa.ops.sparse_flash_attention.by_head import is_faster_by_head

BY_HEAD, ABSORBED = "by head", "absorbed"
LENGTHS = (512, 768, 1024, 2048, 4096, 6144, 8192, 16384)
# Stop a length's rounds once one form takes this many times as long as the other: noise cannot reverse it.
CLEAR = 1.5
DEVIATION = 1e-4
CLOCKS = {"seconds": time.perf_counter, "cpu_seconds": time.process_time}

Step = Callable[[], "tuple[Tensor, ...]"]


def choice(sizes: Sizes, lengths: Sequence[int], rounds: int) -> Metrics:
    """Time both forms at each length, forward and backward with up-projections, in alternation.

    Args:
        sizes: problem sizes; the length is replaced.
        lengths: sequence lengths.
        rounds: maximum number of rounds per length.

    Returns:
        ``absorb_choice_worst_ratio``, the largest ratio over lengths of the selected form's time to the
        faster form's time; ``absorb_choice``, by length the ratio, the selected form and both median times.
    """
    rows = {str(length): _compared(replace(sizes, length=length), rounds) for length in lengths}
    return {
        "absorb_choice_worst_ratio": max(row["ratio"] for row in rows.values()),
        "absorb_choice": rows,
    }


def _compared(sizes: Sizes, rounds: int) -> dict[str, Any]:
    steps = {form: step_in(form, *make_inputs(sizes), sizes) for form in (BY_HEAD, ABSORBED)}
    # These runs are the warmup, too.
    results = {form: step() for form, step in steps.items()}
    for one, other in zip(*results.values(), strict=True):
        deviation = float((one - other).abs().max() / other.abs().max())
        if not deviation < DEVIATION:
            raise RuntimeError(f"both forms differ by {deviation:.1e} of the largest value at {sizes}")
    del results
    taken: dict[str, dict[str, list[float]]] = {kind: {form: [] for form in steps} for kind in CLOCKS}
    for _ in range(rounds):
        for form, step in steps.items():
            started = {kind: clock() for kind, clock in CLOCKS.items()}
            step()
            for kind, clock in CLOCKS.items():
                taken[kind][form].append(clock() - started[kind])
        latest = [times[-1] for times in taken["cpu_seconds"].values()]
        if max(latest) > CLEAR * min(latest):
            break
    medians: dict[str, dict[str, float]] = {
        kind: {form: statistics.median(times) for form, times in forms.items()}
        for kind, forms in taken.items()
    }
    taken_form = chosen(sizes)
    ratios = {kind: times[taken_form] / min(times.values()) for kind, times in medians.items()}
    return {"chosen": taken_form, "ratio": ratios["seconds"], "cpu_ratio": ratios["cpu_seconds"], **medians}


def chosen(sizes: Sizes) -> str:
    """Return the form that ``--use-dsa-absorb auto`` selects on a CPU."""
    by_head = is_faster_by_head(torch.device("cpu"), sizes.length, sizes.topk, sizes.heads, sizes.widths)
    return BY_HEAD if by_head else ABSORBED


def step_in(form: str, inputs: Inputs, grad_out: Tensor, sizes: Sizes) -> Step:
    """Return a step in a form, which returns the output and the gradients of all attention inputs."""
    # Any selection will do if both forms get it; a single index head makes one quickly.
    index = (inputs.index_query[:, :, :1], inputs.index_key, inputs.index_weights[:, :, :1])
    with torch.no_grad():
        topk_indices, _ = lightning_indexer(*(x.transpose(0, 1) for x in index), sizes.topk)

    def step() -> tuple[Tensor, ...]:
        operands = operands_in(form, inputs, sizes)
        if sizes.length <= sizes.topk:
            attended = attend_densely(operands, Rows(), "auto")
        else:  # with the inputs of the indexer's loss
            attended = attend_sparsely(operands, topk_indices, "auto", with_sum=True)
        gradients = torch.autograd.grad(attended.out, inputs.of_attention, grad_out)
        return attended.out.detach(), *gradients

    return step


def operands_in(form: str, inputs: Inputs, sizes: Sizes) -> Operands:
    """Operands of the main attention in a form, projected from the inputs."""
    if form == BY_HEAD:
        return Operands(*projected(inputs, sizes), sizes.softmax_scale)
    query, key = absorbed(inputs)
    return Operands(query, key[:, :, None], inputs.up_value, sizes.softmax_scale)
