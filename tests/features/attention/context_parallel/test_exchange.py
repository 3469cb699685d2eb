"""What layers share of a pack's exchange keeps no process group alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from mindspeed_dsa.context_parallel.head_exchange import _members_of_order
from mindspeed_dsa.context_parallel.layout import Zigzag
from mindspeed_dsa.features.attention.context_parallel.exchange import _gather_in


class Group:
    def rank(self):
        return 0

    def size(self):
        return 2


@pytest.mark.parametrize(
    ("share", "key"), [(_gather_in, Zigzag(2)), (_members_of_order, torch.arange(8))], ids=["keys", "heads"]
)
def test_layers_share_as_long_as_one_of_them_lives(share, key):
    group, other = Group(), Group()
    first = share(group, key)
    assert share(group, key) is first
    assert share(other, key) is not first
    gone = weakref.ref(group)
    del group, first
    gc.collect()
    assert gone() is None
