"""Which entries of an index tensor name a key: the one answer that all backends share."""

from __future__ import annotations

from torch import Tensor


def names_key(topk_indices: Tensor, key_length: int) -> Tensor:
    """Bool, as large as ``topk_indices``: whether an entry lies in ``[0, key_length)``.

    -1 stands for no key. Every other entry that lies outside is treated alike: it is never read.
    """
    return (topk_indices >= 0) & (topk_indices < key_length)
