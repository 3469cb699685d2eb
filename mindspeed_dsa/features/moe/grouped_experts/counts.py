"""Patches that keep the experts' row counts on the device, where the grouped matmul reads them.

Megatron's dispatcher counts on the device and copies the counts to the host, because it multiplies experts
one by one. With expert parallelism it must wait for the split sizes anyway. Without expert parallelism, the
counts are the only reason for the host to wait, and the grouped matmul would copy them back to the device.
These patches avoid both copies: ``preprocess`` keeps the counts, and ``dispatch_postprocess`` returns them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

_EXPERTS = "_mindspeed_dsa_grouped_experts"
_COUNTS = "_mindspeed_dsa_counts"


def know_experts(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``MoELayer.__init__``: attach the experts to the dispatcher."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if hasattr(self.experts, "reads_counts"):
            setattr(self.token_dispatcher, _EXPERTS, self.experts)

    return __init__


def keep_counts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``MoEAlltoAllTokenDispatcher.preprocess``: keep the counts on the device, so nothing is copied."""

    def preprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts = original(self, *args, **kwargs)
        if not _stay(self, counts):
            return counts
        # Kept apart: schedules that move rows on a second stream retain the dispatcher's own tensors.
        setattr(self, _COUNTS, counts)
        if self.cuda_sync_point == "before_finish":
            self.cuda_sync_point = "no_sync"  # the counts are the only data awaited there
        return None

    return preprocess


def _stay(dispatcher: Any, counts: Any) -> bool:
    experts = getattr(dispatcher, _EXPERTS, None)
    if experts is None or not isinstance(counts, Tensor) or counts.device.type == "cpu":
        return False
    # "before_permutation_1" excludes CUDA graphs: a graph passes on only the dispatcher's own attributes,
    # and copies them to the host after its end.
    return dispatcher.cuda_dtoh_point == "before_permutation_1" and not experts.reads_counts()


def give_counts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``MoEAlltoAllTokenDispatcher.dispatch_postprocess``: pass the kept counts to the experts."""

    def dispatch_postprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        rows, on_host, *others = original(self, *args, **kwargs)
        counts = getattr(self, _COUNTS, None)
        if counts is None:
            return rows, on_host, *others
        setattr(self, _COUNTS, None)
        return rows, counts, *others

    return dispatch_postprocess
