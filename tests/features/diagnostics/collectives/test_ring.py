"""Connections from rank to rank: who ends unasked is known to all others, who leaves is missed by nobody."""

from __future__ import annotations

import select

import pytest
import torch.distributed as dist

from mindspeed_dsa.features.diagnostics.collectives.ring import Ring


@pytest.fixture
def rings():
    """Four ranks that are connected; the machine of rank 2 is another one."""
    store = dist.HashStore()
    made = [Ring(store, "job", rank, 4, f"host-{rank == 2}", 100 + rank) for rank in range(4)]
    for ring in made:
        ring.connect()
    yield made
    for ring in made:
        ring.close()


def hear(rings):
    """What each rank hears, once nothing is on its way any more."""
    heard = [{} for _ in rings]
    for _ in range(50):
        for rank, ring in enumerate(rings):
            ready = select.select(ring.waited_for(), [], [], 0.002)[0] if ring.waited_for() else []
            if news := ring.listen(ready):
                heard[rank].update(news)
                ring.tell(heard[rank])
    return heard


def test_all_others_hear_of_a_rank_that_has_ended(rings):
    assert hear(rings) == [{}] * 4
    rings.pop(2).close()  # without a word, as the kernel does it
    gone = {"2": "process 102 on host-True has ended, or cannot be reached any more"}
    assert hear(rings) == [gone] * 3


def test_a_rank_that_fails_says_why(rings):
    hear(rings)
    failed = rings.pop(1)
    failed.tell({"1": "it failed with ValueError: a bad batch"})
    failed.leave()
    assert hear(rings) == [{"1": "it failed with ValueError: a bad batch"}] * 3


def test_ranks_that_leave_are_not_missed(rings):
    hear(rings)
    rings.pop(3).leave()
    rings.pop(0).leave()
    assert hear(rings) == [{}] * 2
