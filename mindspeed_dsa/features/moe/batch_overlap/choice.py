"""Choice whether a microbatch is cut in halves: measured once for layers of one size, in the first step.

Two halves cost more than the whole where time does not grow with the number of tokens: small matmuls, a host
that launches kernels more slowly than the device runs them. What overlap takes back depends on the link. So
forward runs whole and in halves, with the step's own tokens, and the ranks compare the slowest one's times.
Backward follows: it has the same transfers, more computation above them, and the same calls. The choice does
not depend on the number of tokens, which may differ between ranks that have to agree.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, get_args
from weakref import WeakKeyDictionary

import torch

from mindspeed_dsa.features.moe.batch_overlap.halves import Mode
from mindspeed_dsa.log import Log
from mindspeed_dsa.megatron.measured import slowest, timed

_GAIN = 0.97
"""Halves are taken only if they take less than this fraction of the whole's time."""
_ROUNDS = 5
Run = Callable[[Mode], object]
"""A layer's forward, without side effects."""

_chosen: WeakKeyDictionary[Any, dict[Hashable, Mode]] = WeakKeyDictionary()
"""By process group and size of layer."""


def choose(layer: Any, group: Any, run: Run, log: Log) -> Mode:
    """Choose how layers of this size run; a collective call of all of its expert parallel ranks.

    Args:
        layer: Megatron's ``MoELayer``, or a transformer layer that has one.
        group: of these ranks.
        run: its forward.
        log: gets a line for each size.
    """
    known = _chosen.setdefault(group, {})
    size = _size(layer)
    if size not in known:
        times = _measure(run, group)
        known[size] = "interleaved" if times["interleaved"] < _GAIN * times["whole"] else "whole"
        _report(times, type(layer).__name__, log)
    return known[size]


@contextmanager
def without_traces(random: Any, measured: ContextVar[Mode | None], mode: Mode) -> Iterator[None]:
    """Surround a forward that leaves nothing behind: no graph, no counts of tokens, no random states.

    Args:
        random: Megatron's module of random states.
        measured: says what is measured in the block.
        mode: of the layer.
    """
    token = measured.set(mode)
    try:
        with torch.no_grad(), random._fork_rng():
            yield
    finally:
        measured.reset(token)


def _size(layer: Any) -> Hashable:
    """Return what the time of a token depends on; the same on all ranks."""
    weights = tuple((name, weight.shape, weight.dtype) for name, weight in layer.named_parameters())
    return layer.config.moe_router_topk, weights


def _measure(run: Run, group: Any) -> Mapping[Mode, float]:
    """Return the slowest rank's seconds for each mode: medians of rounds in which the modes alternate."""
    modes: tuple[Mode, ...] = get_args(Mode)
    rounds = [[timed(partial(run, mode), group) for mode in modes] for _ in range(1 + _ROUNDS)]
    medians = [statistics.median(seconds) for seconds in zip(*rounds[1:], strict=True)]
    return slowest(dict(zip(modes, medians, strict=True)), group)


def _report(times: Mapping[Mode, float], layer: str, log: Log) -> None:
    whole, in_turn, interleaved = times["whole"], times["in turn"], times["interleaved"]
    if interleaved < _GAIN * whole:
        choice = "tokens are cut"
    elif in_turn - interleaved < (1 - _GAIN) * whole:
        choice = "tokens stay whole, because the transfers leave too little to hide"
    else:
        choice = (
            "tokens stay whole, because halves cost more than overlap takes back: time does not grow with "
            "the number of tokens, or the host does not keep up"
        )
    log.info(
        "forward of a %s takes %.2f ms whole, %.2f ms in two halves one after the other and %.2f ms with "
        "the halves interleaved: %s",
        layer,
        *(1e3 * seconds for seconds in (whole, in_turn, interleaved)),
        choice,
        ranks="stage",
    )
