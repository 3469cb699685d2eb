"""Decision whether layers run in halves, measured once per layer size in the first step.

Two halves take longer than the whole if the time does not scale with the number of tokens: with small
matmuls, or when the host limits the kernel launch rate. The gain from overlap depends on the link. So each
layer's forward is timed in both modes on the first step's tokens, and the slowest rank's times are compared.
Backward is assumed to behave alike: it has the same transfers and more computation to hide them. The number
of tokens is not part of the layer size, because it can differ between ranks, which must all decide the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, get_args
from weakref import WeakKeyDictionary

import torch

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.moe.batch_overlap.feature import Options
from mindspeed_dsa.features.moe.batch_overlap.halves import Mode
from mindspeed_dsa.log import Log
from mindspeed_dsa.megatron.measured import slowest, timed
from mindspeed_dsa.megatron.shared_expert import SharedOutput

_GAIN = 0.97
"""Use halves only if they take less than this fraction of the whole's time."""
_ROUNDS = 5
Run = Callable[[Mode], object]
"""A layer's forward in a mode."""


class State:
    """Mode (whole or in halves) of each layer in a session, and state of the running forward.

    Attributes:
        modes: dict from transformer layer, or dispatcher of an MoE layer, to mode.
        shared, calls: dicts from dispatcher to the postponed shared expert and to the arguments of the
            running forward. As in Megatron, a dispatcher runs one forward at a time.
        is_measured: whether a layer is being timed.
        block: transformer block whose forward is running.
        half: half that is running, a :class:`.stages.Stages`.
    """

    def __init__(self, context: Context[Options]) -> None:
        self._context, self.is_measured = context, False
        self.modes: WeakKeyDictionary[Any, Mode] = WeakKeyDictionary()
        self.shared: WeakKeyDictionary[Any, SharedOutput] = WeakKeyDictionary()
        self.calls: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self.block: Any = None
        self.half: Any = None
        # Measured mode per process group and layer size.
        self._chosen: WeakKeyDictionary[Any, dict[Hashable, Mode]] = WeakKeyDictionary()

    def choose(self, layer: Any, group: Any, run: Run) -> Mode:
        """Return the faster mode for layers of this size, measured once. Collective over ``group``.

        Args:
            layer: Megatron's ``MoELayer``, or a transformer layer that contains one.
            group: expert parallel process group.
            run: function that runs the layer's forward in the mode passed to it.
        """
        random = self._context.megatron("core.tensor_parallel.random")

        def without_traces(mode: Mode) -> None:
            self.is_measured = True
            try:
                with torch.no_grad(), random._fork_rng():
                    run(mode)
            finally:
                self.is_measured = False

        modes = self._chosen.setdefault(group, {})
        size = _size(layer)
        if size not in modes:
            times = _measure(without_traces, group)
            modes[size] = "interleaved" if times["interleaved"] < _GAIN * times["whole"] else "whole"
            _report(times, type(layer).__name__, self._context.log)
        return modes[size]


def _size(layer: Any) -> Hashable:
    """Return a hashable key of the layer's properties that affect its time, equal on all ranks."""
    weights = tuple((name, weight.shape, weight.dtype) for name, weight in layer.named_parameters())
    return layer.config.moe_router_topk, weights


def _measure(run: Run, group: Any) -> Mapping[Mode, float]:
    """Time both modes alternately after one warmup; return the slowest rank's median seconds per mode."""
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
