"""Indexer loss: its weight, and that of the current step, which trackers add to a sum over the log interval.

A feature that calls or wraps a tracker keeps the loss with :func:`keep_step_loss`; one that records steps
takes it. One that runs a microbatch in parts gives each of them its part of the loss, a mean over rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from mindspeed_dsa.feature import Context, Megatron

_NAME = "indexer loss"
_kept: dict[Megatron, Tensor] = {}


def keep_step_loss(original: Callable[..., Any], context: Context[Any]) -> Callable[..., Any]:
    """Decorate ``DSAIndexerLossLoggingHelper.track_indexer_metrics``.

    The caller's dictionary holds a sum over the steps since the last log line. The original adds to
    an empty one here, which is then added to the caller's: the same sum, and the step's own share.
    """

    def track_indexer_metrics(*args: Any, **kwargs: Any) -> Any:
        total = kwargs.get("total_loss_dict")
        if total is None:
            return original(*args, **kwargs)
        share: dict[str, Tensor] = {}
        result = original(*args, **{**kwargs, "total_loss_dict": share})
        for name, loss in share.items():
            total[name] = total[name] + loss if name in total else loss
        if _NAME in share:
            _kept[context.megatron] = share[_NAME]
        return result

    return track_indexer_metrics


def take_step_loss(megatron: Megatron) -> Tensor | None:
    """Return the loss kept since the last call, a scalar; ``None`` if the job has no such loss."""
    return _kept.pop(megatron, None)


@contextmanager
def part_of_loss(config: Any, share: float) -> Iterator[None]:
    """Weigh indexer losses of the block, and what is logged of them.

    Args:
        config: Megatron's, of the model; without an indexer nothing is weighed.
        share: of the microbatch's rows that are in the block.
    """
    with weighing_loss(config, share * (getattr(config, _WEIGHT, None) or 0.0)):
        yield


@contextmanager
def weighing_loss(config: Any, weight: float | None) -> Iterator[None]:
    """Have indexer losses of the block weighed by this instead of what the configuration has."""
    before = getattr(config, _WEIGHT, None)
    if before is None:
        yield
        return
    setattr(config, _WEIGHT, weight)
    try:
        yield
    finally:
        setattr(config, _WEIGHT, before)


_WEIGHT = "dsa_indexer_loss_coeff"
