"""Trace of a step of the pair of layers, with its matmuls and transfers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.tp_overlap.cells import Sizes, pair_step, start, way

_MATMULS = ("mm", "matmul", "addmm")
_COLLECTIVES = {
    "all_gather": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "all_to_all_single": "reduce-scatter",  # of the CPU platform
    "all_reduce": "all-reduce",
}
_GLOO_THREADS = 2  # number of a group's collectives that run concurrently, in starting order

SpanNames = Mapping[str, str | Callable[[], str]]
"""Names of spans, or functions that return them, by the name of ``torch.distributed``'s function."""


@dataclass
class Span:
    """Time span on a rank, in seconds of the host's clock, which all ranks share."""

    name: str
    lane: str
    start: float
    end: float = 0.0


def record(sizes: Sizes, inner: int) -> dict[str, list[Span]]:
    """Return this rank's spans of one forward and backward, by variant.

    Args:
        sizes: pair's sizes.
        inner: pair's inner width.
    """
    start()
    step = pair_step(sizes, inner)
    by_variant = {}
    for name in ("stock", "overlapped"):
        with way(name):
            for _ in range(2):  # warm-up: tune chunks, allocate memory
                step()
            dist.barrier()
            with recorded(_COLLECTIVES) as spans:
                step()
            by_variant[name] = without_queueing(spans)
    return by_variant


@contextlib.contextmanager
def recorded(
    collectives: SpanNames, matmul: Callable[[Any, Any], str] = lambda left, right: "matmul"
) -> Iterator[list[Span]]:
    """Yield spans of the block's matmuls and transfers; the list is complete when the block has ended.

    Args:
        collectives: names of spans.
        matmul: function from the two factors to a span's name.
    """
    from megatron.core.tensor_parallel import layers, mappings

    spans: list[Span] = []
    product, transfer = partial(_matmul, matmul), partial(_collective, collectives)
    places: list[tuple[Any, str, Callable[..., Any]]] = [(torch, name, product) for name in _MATMULS]
    places.append((torch.Tensor, "matmul", product))
    places += [(dist, name, transfer) for name in collectives]
    for module in (layers, mappings):  # names that were bound when Megatron was imported
        if hasattr(module, "dist_all_gather_func"):
            places.append((module, "dist_all_gather_func", transfer))
    with contextlib.ExitStack() as stack:
        for owner, name, decorate in places:
            original = getattr(owner, name)
            stack.enter_context(mock.patch.object(owner, name, decorate(original, spans)))
        yield spans
    for span in spans:
        while not span.end:  # set by the thread that completes a transfer
            time.sleep(1e-4)


def _matmul(
    named: Callable[[Any, Any], str], original: Callable[..., Any], spans: list[Span]
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        span = Span(named(*args[-2:]), "matmul", time.perf_counter())
        result = original(*args, **kwargs)
        span.end = time.perf_counter()
        spans.append(span)
        return result

    return call


def _collective(names: SpanNames, original: Callable[..., Any], spans: list[Span]) -> Callable[..., Any]:
    name = names.get(original.__name__, original.__name__)

    def call(*args: Any, **kwargs: Any) -> Any:
        span = Span(name() if callable(name) else name, "transfer", time.perf_counter())
        spans.append(span)
        work = original(*args, **kwargs)
        if work is None:
            span.end = time.perf_counter()
            return None
        # Not every gloo work has a future. A collective supports a second wait, messages between two ranks do
        # not: the caller waits for the thread that waits for them.
        works = work if isinstance(work, list) else [work]
        thread = threading.Thread(target=_watch, args=(works, span), daemon=True)
        thread.start()
        return [SimpleNamespace(wait=thread.join)] if isinstance(work, list) else work

    return call


def _watch(works: list[Any], span: Span) -> None:
    for work in works:
        work.wait()
    span.end = time.perf_counter()


def without_queueing(spans: list[Span]) -> list[Span]:
    """Begin transfers when a gloo thread picks them up, instead of when they are enqueued."""
    transfers = sorted((span for span in spans if span.lane == "transfer"), key=lambda span: span.start)
    busy_until = [0.0] * _GLOO_THREADS
    for span in transfers:
        thread = min(range(_GLOO_THREADS), key=lambda index: busy_until[index])
        span.start = max(span.start, min(busy_until[thread], span.end))
        span.lane = f"transfer {thread + 1}"
        busy_until[thread] = span.end
    return spans
