"""What layers share of an exchange is bounded, and keeps no process group alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from mindspeed_dsa.context_parallel.gather import Members
from mindspeed_dsa.context_parallel.layout import Zigzag
from mindspeed_dsa.features.attention.context_parallel.head_exchange import _members_of_order

CASES = "tests.features.dsa.key_exchange.cases"


class Group:
    def rank(self):
        return 0

    def size(self):
        return 2


def of_length(group, length):
    return Members.of(group, Zigzag(2), length)


@pytest.mark.parametrize(
    ("share", "key"), [(of_length, 24), (_members_of_order, torch.arange(8))], ids=["keys", "heads"]
)
def test_layers_share_rows_and_hold_no_group(share, key):
    group, other = Group(), Group()
    first = share(group, key)
    assert share(group, key).held is first.held
    assert share(other, key) is not first
    gone = weakref.ref(group)
    del group, first
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("kind", ["keys", "keys of blocks", "heads", "ends"])
def test_lengths_that_come_and_go_leave_no_memory(pool, kind):
    """What lives is a few lengths' worth, and what was in flight meanwhile has its gradient.

    Of 40 lengths around 800 rows, two layers held 128 KB of ends and 512 KB of everybody's rows.
    """
    for found in pool.run(f"{CASES}:many_lengths", 2, kind=kind):
        few, many = found["bytes"]
        assert few > 0
        assert many - few < 100_000
        assert found["late"] <= 1e-12
