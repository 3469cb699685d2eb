"""Decision whether to cut a microbatch in halves, measured once per layer size in the first step.

Two halves cost more than the whole where time does not grow with the number of tokens: with small matmuls, or
when the host launches kernels more slowly than the device runs them. The gain from overlap depends on the
link. So forward runs whole and in halves on the step's own tokens, and the ranks compare the slowest rank's
times. Backward is assumed to behave alike: it has the same transfers and calls, and more computation to hide
them. The decision does not depend on the number of tokens, which may differ between ranks that must agree.
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
    """Modes of a session's layers, and the forward that is running.

    Attributes:
        modes: mode per transformer layer, and per dispatcher of a MoE layer.
        shared, calls: postponed shared expert and arguments of the running forward, per dispatcher. Megatron
            too gives a dispatcher one forward at a time.
        is_measured: whether a layer is being measured.
        block: transformer block whose layers run.
        half: half whose stage runs, a :class:`.stages.Stages`.
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
        """Return the mode for layers of this size. Collective over the layer's expert parallel ranks.

        Args:
            layer: Megatron's ``MoELayer``, or a transformer layer with one.
            group: expert parallel process group.
            run: function that runs the layer's forward in a mode.
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
    """Return a key of all properties that determine the time per token, equal on all ranks."""
    weights = tuple((name, weight.shape, weight.dtype) for name, weight in layer.named_parameters())
    return layer.config.moe_router_topk, weights


def _measure(run: Run, group: Any) -> Mapping[Mode, float]:
    """Return the slowest rank's median seconds per mode; the modes alternate, and round 0 is warmup."""
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
