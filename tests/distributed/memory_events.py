"""What the memory features did during a job: without it, a feature that does nothing would pass as exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

EVENTS = {
    "reuse-fp32-param": "master forms",
    "recompute-activation-function": "freed outputs",
    "recompute-norm": "freed outputs",
    "swap-attention": "host bytes in passing",
    "swap-optimizer": "host bytes for good",
    "virtual-optimizer": "host bytes for good",
}
"""What has to be counted where a feature is on."""


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count freed outputs, changes of weights into master form and bytes taken from the host pool."""
    from mindspeed_dsa.features.memory.masters import Masters
    from mindspeed_dsa.platforms.host_pool import HostPool

    counts: Counter[str] = Counter()
    resize, to_master, take = torch.UntypedStorage.resize_, Masters.to_master, HostPool.take

    def counting_resize(self: Any, size: int) -> Any:
        counts["freed outputs"] += size == 0
        return resize(self, size)

    def counting_to_master(self: Any) -> None:
        counts["master forms"] += 1
        to_master(self)

    def counting_take(self: Any, nbytes: int, exact: bool = False, **remedy: str) -> Any:
        counts["host bytes for good" if exact else "host bytes in passing"] += nbytes
        return take(self, nbytes, exact, **remedy)

    with (
        mock.patch.object(torch.UntypedStorage, "resize_", counting_resize),
        mock.patch.object(Masters, "to_master", counting_to_master),
        mock.patch.object(HostPool, "take", counting_take),
    ):
        yield counts
