"""Rows of ranks compared with Megatron's own slicing, and the balance of their work."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.context_parallel.layout import Contiguous, Zigzag, rows_of_all, split


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_zigzag_is_megatrons(ranks, monkeypatch):
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    whole = torch.arange(2 * 24).view(2, 24)
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: ranks)
    for rank in range(ranks):
        monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda rank=rank: rank)
        theirs = get_batch_on_this_cp_rank({"tokens": whole})["tokens"]
        assert split(whole, Zigzag(ranks), rank, dim=1).equal(theirs)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_zigzag_is_torchs_head_and_tail(ranks):
    from torch.distributed.tensor.experimental._attention import _HeadTailLoadBalancer

    theirs = _HeadTailLoadBalancer(24, ranks, "cpu")._generate_indices()
    assert rows_of_all(Zigzag(ranks), 24).tolist() == theirs.view(ranks, -1).tolist()


def test_blocks_repeat_it():
    assert rows_of_all(Zigzag(2, block_rows=1), 8).tolist() == [[0, 3, 4, 7], [1, 2, 5, 6]]


@pytest.mark.parametrize("layout", [Zigzag(3), Zigzag(2, 4), Zigzag(1), Contiguous(4)])
def test_parts_join_to_the_whole(layout):
    whole = torch.randn(2, 48, 3)
    parts = [split(whole, layout, rank, dim=1) for rank in range(layout.ranks)]
    order = rows_of_all(layout, whole.size(1)).flatten().argsort()
    assert torch.cat(parts, dim=1).index_select(1, order).equal(whole)


def test_consecutive_rows():
    assert rows_of_all(Contiguous(2), 6).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("length", [16384, 65536])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_blocks_balance_what_the_zigzag_does_not(length, ranks):
    """Largest over mean work, K 2048: the indexer scores every visible key, attention reads the selected."""

    def imbalance(layout, most):
        pairs = (rows_of_all(layout, length) + 1).clamp(max=most).sum(dim=1).double()
        return float(pairs.max() / pairs.mean())

    stock, blocks = Zigzag(ranks), Zigzag(ranks, 128)
    assert imbalance(stock, length) == imbalance(blocks, length) == 1
    assert imbalance(stock, 2048) == pytest.approx(1 / (1 - 2047 / (2 * length)))
    assert imbalance(blocks, 2048) == 1


def test_what_cannot_be_dealt_is_refused():
    with pytest.raises(ValueError, match=r"30 rows cannot be dealt to 4 .* use a multiple of 8"):
        Zigzag(4).rows_of_rank(0, 30)
    with pytest.raises(ValueError, match="two blocks of 16 rows each; use a multiple of 64"):
        Zigzag(2, 16).rows_of_rank(0, 96)
    with pytest.raises(ValueError, match="use a multiple of 8"):
        Zigzag(4).rows_of_rank(0, 4)
    with pytest.raises(ValueError, match=r"30 rows cannot be dealt evenly to 4 .* use a multiple of 4"):
        Contiguous(4).rows_of_rank(0, 30)
