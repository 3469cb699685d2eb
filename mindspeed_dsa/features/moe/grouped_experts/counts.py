"""Numbers of rows of each expert, which stay on the device where the experts' products read them there.

Megatron's dispatcher counts on the device and sends the numbers to the host, for experts that are multiplied
one by one. With expert parallelism it waits for split sizes of its transfers anyway; without, these numbers
are all that it waits for. Back on the device they would cost a copy from the host. So they go past the
dispatcher's copies: the step that counts keeps them, and the step before the experts returns them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

_EXPERTS = "_mindspeed_dsa_grouped_experts"
_COUNTS = "_mindspeed_dsa_counts"


def know_experts(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``MoELayer.__init__``: the dispatcher knows whose rows it counts."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if hasattr(self.experts, "reads_counts"):
            setattr(self.token_dispatcher, _EXPERTS, self.experts)

    return __init__


def keep_counts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``MoEAlltoAllTokenDispatcher.preprocess``: nothing is left for the dispatcher to copy."""

    def preprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts = original(self, *args, **kwargs)
        if not _stay(self, counts):
            return counts
        # A tensor of its own: schedules that move rows on a second stream keep the dispatcher's tensors.
        setattr(self, _COUNTS, counts)
        if self.cuda_sync_point == "before_finish":
            self.cuda_sync_point = "no_sync"  # the counts are all that is waited for there
        return None

    return preprocess


def _stay(dispatcher: Any, counts: Any) -> bool:
    experts = getattr(dispatcher, _EXPERTS, None)
    if experts is None or not isinstance(counts, Tensor) or counts.device.type == "cpu":
        return False
    # A CUDA graph hands on the dispatcher's own attributes, and copies them behind itself.
    return dispatcher.cuda_dtoh_point == "before_permutation_1" and not experts.reads_counts()


def give_counts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``MoEAlltoAllTokenDispatcher.dispatch_postprocess``: the experts get what was kept."""

    def dispatch_postprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        rows, on_host, *others = original(self, *args, **kwargs)
        counts = getattr(self, _COUNTS, None)
        if counts is None:
            return rows, on_host, *others
        setattr(self, _COUNTS, None)
        return rows, counts, *others

    return dispatch_postprocess
