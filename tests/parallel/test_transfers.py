"""Messages between ranks: receives are posted before sends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindspeed_dsa.parallel import transfers

RANKS = 3


class Group:
    def rank(self):
        return 1

    def size(self):
        return RANKS


def around(group, tensor):
    transfers.pass_on(tensor, group)
    return 1


def between_pairs(group, tensor):
    transfers.exchange_pairs([[tensor, tensor]] * RANKS, [[tensor, tensor]] * RANKS, group)
    return 2 * (RANKS - 1)


@pytest.mark.parametrize("start", [around, between_pairs])
def test_receives_are_posted_before_sends(monkeypatch, start):
    """gloo sends once it knows of the receive, and that notice queues behind earlier sends."""
    posted = []
    dist = SimpleNamespace(
        isend="send",
        irecv="receive",
        P2POp=lambda function, tensor, peer, group, tag: (function, peer),
        get_rank=lambda group: group.rank(),
        get_world_size=lambda group: group.size(),
        get_global_rank=lambda group, rank: rank,
        batch_isend_irecv=posted.extend,
    )
    monkeypatch.setattr(transfers, "dist", dist)
    each = start(Group(), torch.zeros(2))
    assert [function for function, _ in posted] == ["receive"] * each + ["send"] * each
    assert 1 not in {peer for _, peer in posted}
