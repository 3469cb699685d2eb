"""Measurements on the ranks of a link bed: single linear layers by direction, and a pair of layers."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.features.tensor_parallel.overlap.chunked import Gather, bounds
from mindspeed_dsa.parallel.collectives import exchange, reduce_scatter_tensor

LAYERS, DIRECTIONS = ("column", "row"), ("forward", "backward")
FIXED = (2, 4, 8)
WAYS = ("stock", "overlapped", *map(str, FIXED))
RATIO = 1.1
ALLOWED = (0.8, 1.25)
_MULTIPLE = 32
_ATTEMPTS = 6
_DEVIATION = 1e-6
Works = dict[str, Callable[[], float]]
"""Variants of the computation by name; each returns its time in seconds."""
Step = Callable[[], dict[str, Tensor]]
"""Forward and backward; returns results and gradients by name."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement.

    Attributes:
        rows: rows of each rank, ``sequence / tp * batch``.
        hidden: width of the transferred tensor.
        rounds: number of rounds; a round runs every variant once.
    """

    rows: int = 2048
    hidden: int = 1024
    rounds: int = 9


def measure(sizes: Sizes, inner: int | None = None) -> dict[str, Any]:
    """Return all figures of this link, the same on all ranks.

    Args:
        sizes: problem sizes.
        inner: width between the layers of the pair; if given, only the pair is measured.
    """
    start()
    figures: dict[str, Any] = {}
    if inner is None:
        figures["cells"] = {
            layer: {direction: _cell(sizes, layer, direction) for direction in DIRECTIONS} for layer in LAYERS
        }
    figures["pair"] = _pair(sizes, inner)
    figures["reduce_scatter"] = _reduce_scatters(sizes)
    measured = [cell for cells in figures.get("cells", {}).values() for cell in cells.values()]
    figures["deviation"] = max(each["deviation"] for each in [figures["pair"], *measured])
    return figures


def start() -> None:
    """Enable the feature, and make all ranks one tensor parallel group."""
    import mindspeed_dsa

    mindspeed_dsa.enable(use_ascend_coc=True)
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def way(name: str) -> AbstractContextManager[Any]:
    """Set the layers' communication in the block: ``stock``, ``overlapped`` or a number of chunks."""
    from mindspeed_dsa import session

    chunks = {"overlapped": 0, "stock": 1}.get(name)
    running = session.current()
    assert running is not None
    options = running.contexts["ascend-coc"].options
    return mock.patch.dict(vars(options), chunks=int(name) if chunks is None else chunks)


def layer_of(kind: str, width: int, out: int) -> Any:
    """Build a layer with sequence parallelism and no bias; ``width`` and ``out`` are one rank's."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    ranks = dist.get_world_size()
    common = {
        "config": ModelParallelConfig(tensor_model_parallel_size=ranks, sequence_parallel=True),
        "init_method": lambda weight: torch.nn.init.normal_(weight, std=0.02),
        "bias": False,
        "skip_bias_add": False,
    }
    if kind == "column":
        return ColumnParallelLinear(width, out * ranks, gather_output=False, **common)
    return RowParallelLinear(width * ranks, out, input_is_parallel=True, **common)


def slowest(seconds: float) -> float:
    """Return the largest value of all ranks; for times, the slowest rank's."""
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def timed(work: Callable[[], object]) -> float:
    """Return the seconds until all ranks are done; they start together."""
    dist.barrier()
    start = time.perf_counter()
    work()
    return slowest(time.perf_counter() - start)


def medians(works: Works, rounds: int) -> dict[str, float]:
    """Return medians of alternating variants; the first round, which tunes chunks, is discarded."""
    samples: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    # Begin each round with another variant: the previous one affects caches and connections.
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            seconds = works[name]()
            if number:
                samples[name].append(seconds)
    return {name: statistics.median(values) for name, values in samples.items()}


def _tensors(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Return rows of one rank and of all ranks."""
    whole = torch.randn(sizes.rows * dist.get_world_size(), sizes.hidden)
    return whole[: sizes.rows].clone(), whole


def _agreed(count: float) -> int:
    """Return a rounded width, the same on all ranks."""
    shared = torch.tensor([max(_MULTIPLE, round(count / _MULTIPLE) * _MULTIPLE)])
    dist.broadcast(shared, 0)
    return int(shared)


def _alone(sizes: Sizes, gathers: int, scatters: int, forwards: int, backwards: int, inner: int) -> Works:
    """Return the collectives, and the matmuls of forwards and backwards, without overlap."""
    local, whole = _tensors(sizes)
    weight, product = torch.randn(inner, sizes.hidden), torch.randn(whole.size(0), inner)

    def transfers() -> None:
        for _ in range(gathers):
            dist.all_gather_into_tensor(whole, local)
        for _ in range(scatters):
            reduce_scatter_tensor(local, whole)

    def products() -> None:
        for _ in range(forwards):
            torch.mm(whole, weight.t())
        for _ in range(backwards):
            torch.mm(product, weight)
            torch.mm(product.t(), whole)

    return {"transfer": lambda: timed(transfers), "matmul": lambda: timed(products)}


def _transfer_in_chunks(
    sizes: Sizes, layer: str, direction: str, width: int, out: int
) -> Callable[[], float]:
    """Return the transfers of an overlapped layer, in the chunks that were tuned for it, without a matmul.

    Chunks are transferred concurrently, which by itself may be faster than one transfer after the other.
    """
    local, whole = _tensors(sizes)
    group, received = dist.group.WORLD, torch.zeros_like(local)
    parts = whole.unflatten(0, (-1, sizes.rows))[1:]  # [tp - 1, rows, hidden]: parts that the other ranks add
    gathers, scatters = _transfers(layer, direction)

    def transfer(chunks: int) -> None:
        pending: list[Any] = []
        if gathers:
            pending.append(Gather(local, group, 1 if scatters else chunks))
        if scatters:
            for first, end in bounds(sizes.rows, chunks):
                pending.append(exchange(received[first:end], parts[:, first:end].contiguous(), group))
        for each in pending:
            each.wait()

    return lambda: timed(partial(transfer, _chosen(f"{layer} {direction}", width, out)))


def _transfers(layer: str, direction: str) -> tuple[int, int]:
    """Return numbers of all-gathers and reduce-scatters."""
    gathers = int((layer, direction) != ("row", "forward"))
    scatters = int((layer, direction) in (("row", "forward"), ("column", "backward")))
    return gathers, scatters


def _balanced(sizes: Sizes, gathers: int, scatters: int, forwards: int, backwards: int) -> int:
    """Return the inner width for which transfers take :data:`RATIO` of the matmuls' time on this machine."""
    inner = sizes.hidden // 4
    for _ in range(4):
        found = medians(_alone(sizes, gathers, scatters, forwards, backwards, inner), 5)
        ratio = found["transfer"] / found["matmul"]
        if 0.95 < ratio / RATIO < 1.05:
            break
        # Transfers do not depend on the inner width, and matmuls are proportional to it.
        inner = _agreed(inner * ratio / RATIO)
    return inner


def _cell(sizes: Sizes, layer: str, direction: str) -> dict[str, Any]:
    """Measure one layer and direction, at a width for which transfer and matmul take about as long."""
    counts = *_transfers(layer, direction), int(direction == "forward"), int(direction == "backward")
    inner = _balanced(sizes, *counts)
    for _ in range(_ATTEMPTS):
        cell = _cell_of(sizes, layer, direction, counts, inner)
        ratio = cell["milliseconds"]["transfer"] / cell["milliseconds"]["matmul"]
        if ALLOWED[0] <= ratio <= ALLOWED[1]:
            break
        inner = _agreed(inner * ratio / RATIO)  # one transfer may take twice as long as the next
    return cell


def _cell_of(
    sizes: Sizes, layer: str, direction: str, counts: tuple[int, int, int, int], inner: int
) -> dict[str, Any]:
    local, whole = _tensors(sizes)
    width, out = (sizes.hidden, inner) if layer == "column" else (inner, sizes.hidden)
    module = layer_of(layer, width, out)
    narrow = torch.randn(whole.size(0), inner)
    input, grad = (local, narrow) if layer == "column" else (narrow, local)
    compute = _layer_step(module, input, grad)
    deviation = _require_same_results(f"{layer} {direction}", compute)
    works = _alone(sizes, *counts, inner)
    for name in WAYS:
        works[name] = _layer_work(name, module, input, grad, direction)
    works["transfer in chunks"] = _transfer_in_chunks(sizes, layer, direction, width, out)
    found = medians(works, sizes.rounds)
    return {
        "milliseconds": {name: 1e3 * seconds for name, seconds in found.items()},
        "m_k_n": [whole.size(0), width, out],
        "chunks": _chosen(f"{layer} {direction}", width, out),
        "deviation": deviation,
    }


def _layer_step(module: Any, input: Tensor, grad: Tensor) -> Step:
    """Return forward and backward of one layer, which return its output and gradients."""

    def step() -> dict[str, Tensor]:
        module.weight.grad = None
        leaf = input.detach().requires_grad_()
        output = module(leaf)[0]
        output.backward(grad)
        return {"output": output.detach(), "input": leaf.grad, "weight": module.weight.grad}

    return step


def _layer_work(name: str, module: Any, input: Tensor, grad: Tensor, direction: str) -> Callable[[], float]:
    def work() -> float:
        module.weight.grad = None
        leaf = input.detach().requires_grad_()
        with way(name):
            if direction == "forward":
                return timed(lambda: module(leaf))
            output = module(leaf)[0]
            return timed(lambda: output.backward(grad))

    return work


def _chosen(kind: str, width: int, out: int) -> int:
    """Return the tuned number of chunks for a layer of these widths."""
    from mindspeed_dsa import session
    from mindspeed_dsa.features.tensor_parallel.overlap.tuning import Tuning

    running = session.current()
    assert running is not None
    widths = {(width, out), (out, width)}  # backward swaps k and n
    (chunks,) = (
        chunks
        for problem, chunks in running.contexts["ascend-coc"].state(Tuning).chosen().items()
        if problem.kind == kind and (problem.k, problem.n) in widths
    )
    return chunks


def _pair(sizes: Sizes, inner: int | None) -> dict[str, Any]:
    """Measure a column parallel layer followed by a row parallel one, forward and backward."""
    inner = inner or _balanced(sizes, gathers=3, scatters=2, forwards=2, backwards=2)
    step = pair_step(sizes, inner)
    deviation = _require_same_results("pair", step)
    works = _alone(sizes, 3, 2, 2, 2, inner)
    for name in WAYS:
        works[name] = partial(_in, name, step)
    median_seconds = medians(works, 2 * sizes.rounds)
    widths = {"column": (sizes.hidden, inner), "row": (inner, sizes.hidden)}
    return {
        "milliseconds": {name: 1e3 * seconds for name, seconds in median_seconds.items()},
        "hidden_inner": [sizes.hidden, inner],
        "chunks": {
            layer: {direction: _chosen(f"{layer} {direction}", *widths[layer]) for direction in DIRECTIONS}
            for layer in LAYERS
        },
        "deviation": deviation,
    }


def _reduce_scatters(sizes: Sizes) -> dict[str, float]:
    """Return the seconds of torch's own reduce-scatter over gloo and of the platform's."""
    local, whole = _tensors(sizes)
    ways = {"torch": dist.reduce_scatter_tensor, "platform": reduce_scatter_tensor}
    sums = {name: torch.empty_like(local) for name in ways}
    for name, scatter in ways.items():
        scatter(sums[name], whole)
    if slowest(float((sums["torch"] - sums["platform"]).abs().max())) > _DEVIATION * float(whole.abs().max()):
        raise RuntimeError("tp-overlap: the platform's reduce-scatter gives a different sum than torch's")
    works: Works = {name: partial(timed, partial(scatter, local, whole)) for name, scatter in ways.items()}
    return medians(works, sizes.rounds)


def _in(name: str, work: Callable[[], object]) -> float:
    with way(name):
        return timed(work)


def pair_step(sizes: Sizes, inner: int) -> Step:
    """Return forward and backward of the pair, ``hidden -> tp * inner -> hidden``."""
    column, row = layer_of("column", sizes.hidden, inner), layer_of("row", inner, sizes.hidden)
    input, _ = _tensors(sizes)
    grad = torch.randn_like(input)

    def step() -> dict[str, Tensor]:
        column.weight.grad = row.weight.grad = None
        leaf = input.detach().requires_grad_()
        output = row(column(leaf)[0])[0]
        output.backward(grad)
        return {
            "output": output.detach(),
            "input": leaf.grad,
            "column": column.weight.grad,
            "row": row.weight.grad,
        }

    return step


def _require_same_results(what: str, step: Step) -> float:
    """Return the largest relative deviation of any variant from stock, at the sizes to be timed.

    Raises:
        RuntimeError: the deviation exceeds 1e-6, or is NaN; all ranks raise it.
    """
    with way("stock"):
        expected = step()
    worst = 0.0
    for name in WAYS[1:]:
        with way(name):
            for key, value in step().items():
                found = float((value - expected[key]).norm() / expected[key].norm())
                worst = max(worst, math.inf if math.isnan(found) else found)
    worst = slowest(worst)
    if worst > _DEVIATION:
        raise RuntimeError(f"tp-overlap: results of {what} differ from stock by {worst:.1e}; it is not timed")
    if dist.get_rank() == 0:
        print(f"{what}: results agree with stock to {worst:.1e}", file=sys.stderr, flush=True)
    return worst
