"""Indexer loss: its coefficient, and its value in the current step.

Megatron's tracker adds the loss to a sum over the log interval. :func:`keep_step_loss` wraps the tracker and
stores the value of the current step, and :func:`take_step_loss` returns it to features that record steps. The
loss is a mean over tokens, so a feature that splits a microbatch scales each part's loss with
:func:`part_of_loss` by the part's share of the tokens.
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
    """Decorate ``DSAIndexerLossLoggingHelper.track_indexer_metrics``: also store the current step's loss."""
    # The caller's dictionary holds a sum over the steps since the last log line. The original adds to an
    # empty dictionary instead, which gives the step's own value. The value is then added to the caller's
    # sum.

    def track_indexer_metrics(*args: Any, **kwargs: Any) -> Any:
        total = kwargs.get("total_loss_dict")
        if total is None:
            return original(*args, **kwargs)
        share: dict[str, Tensor] = {}
        result = original(*args, **{**kwargs, "total_loss_dict": share})
        for name, loss in share.items():
            # The same sum that the original would have computed.
            total[name] = total[name] + loss if name in total else loss
        if _NAME in share:
            _kept[context.megatron] = share[_NAME]
        return result

    return track_indexer_metrics


def take_step_loss(megatron: Megatron) -> Tensor | None:
    """Return and clear the stored indexer loss of the current step, a scalar; ``None`` if none is stored."""
    return _kept.pop(megatron, None)


@contextmanager
def part_of_loss(config: Any, share: float) -> Iterator[None]:
    """Scale the indexer losses computed in the block, and their logged values.

    Args:
        config: Megatron's configuration of the model; without an indexer nothing changes.
        share: fraction of the microbatch's tokens that the block processes, 0 to 1.
    """
    # Each part's loss is a mean over its tokens: with shares 1/4 and 3/4, loss = 1/4 * part1 + 3/4 * part2.
    with weighing_loss(config, share * (getattr(config, _WEIGHT, None) or 0.0)):
        yield


@contextmanager
def weighing_loss(config: Any, weight: float | None) -> Iterator[None]:
    """Set the configuration's indexer loss coefficient to ``weight`` inside the block."""
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
