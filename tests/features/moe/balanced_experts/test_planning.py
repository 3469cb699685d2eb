"""The plan moves only experts that pay, and picks the subset that minimizes the busiest rank's time."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations, pairwise
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_dsa.features.moe.balanced_experts import planning
from mindspeed_dsa.features.moe.balanced_experts.planning import Costs, Rates, chain_of, choose, nodes_of
from tests.support.contexts import context

FREE = Costs(row=1.0, token=0.0, weights=0.0, gradients=0.0)
"""Costs with free transfers, so the best balance is the best plan."""


def routed(
    experts: int, top_k: int, ranks: int, zipf: float, tokens: int = 4096, spread: bool = False, seed: int = 0
):
    """Return counts ``[ranks, experts]`` of a simulated router; popular experts are neighbours, or spread."""
    noise = np.random.default_rng(seed)
    logits = -zipf * np.log(np.arange(1, experts + 1))
    if spread:
        noise.shuffle(logits)
    # The top k of logits with Gumbel noise are k draws without replacement.
    noisy = logits + noise.gumbel(size=(ranks, tokens, experts))
    topk = np.argpartition(-noisy, top_k - 1, axis=-1)[..., :top_k]
    return np.stack([np.bincount(own.ravel(), minlength=experts) for own in topk])


def imbalance(counts) -> float:
    loads = counts.sum(axis=0).reshape(counts.shape[0], -1).sum(axis=1)
    return loads.max() / loads.mean()


@pytest.mark.parametrize(
    ("experts", "top_k", "ranks", "zipf", "before", "after"),
    [
        (8, 2, 2, 1.2, 1.55, 1.05),
        (8, 2, 4, 0.8, 1.83, 1.15),
        (8, 2, 4, 1.2, 2.21, 1.20),
        (64, 6, 2, 1.0, 1.65, 1.37),
        (64, 6, 4, 1.0, 2.63, 1.77),
    ],
)
def test_popular_neighbours_are_balanced(experts, top_k, ranks, zipf, before, after):
    counts = routed(experts, top_k, ranks, zipf)
    assert imbalance(counts) == pytest.approx(before, rel=0.02)
    plan = choose(counts, FREE, 3)
    assert 0 < len(plan.experts) <= 3
    assert plan.imbalance <= after
    assert plan.rows == loads_of(counts, plan.experts)


def loads_of(counts, experts) -> tuple[int, ...]:
    """Return the number of rows per rank, counted one by one."""
    ranks, count = counts.shape
    loads = [0] * ranks
    for source in range(ranks):
        for expert in range(count):
            owner = expert // (count // ranks)
            loads[source if expert in experts else owner] += int(counts[source, expert])
    return tuple(loads)


def seconds_of(counts, experts, costs) -> float:
    """Evaluate the cost model: weights travel with the cold rows, and all ranks wait for the slowest."""
    ranks, count = counts.shape
    per_rank = count // ranks
    # Rows per rank of its own and of moved experts, rows out and back.
    cold, hot, out, back = (np.zeros(ranks) for _ in range(4))
    # Weights sent and received, and hops of the longest chains, each inside nodes and between them.
    sent, received, hops = np.zeros((2, ranks)), np.zeros((2, ranks)), np.zeros(2)
    links = np.array([1.0, costs.beyond])
    for source in range(ranks):
        for expert in range(count):
            owner, rows = expert // per_rank, counts[source, expert]
            if owner == source or expert not in experts:
                cold[owner] += rows
                if owner != source:
                    out[source] += rows
                    back[owner] += rows
            else:
                hot[source] += rows
    for expert in experts:
        owner = expert // per_rank
        receivers = [rank for rank in range(ranks) if rank != owner and counts[rank, expert]]
        own_hops = np.zeros(2)
        for sender, receiver in pairwise((owner, *chain_of(owner, receivers, costs.nodes))):
            way = int(costs.nodes[sender] != costs.nodes[receiver])
            sent[way, sender] += 1
            received[way, receiver] += 1
            own_hops[way] += 1
        hops = np.maximum(hops, own_hops)
    # A link carries one copy after the other, and the last rank of a chain gets the last piece later.
    copies = max(links[way] * max(sent[way].max(), received[way].max()) for way in (0, 1))
    late = hops @ links - max(links[way] * (hops[way] > 0) for way in (0, 1))
    # Rows go out and back, in forward and in backward.
    time = 4 * costs.token * max(out.max(), back.max())
    # Backward has twice the matmuls of forward.
    for row, transfer in ((costs.row, costs.weights), (2 * costs.row, costs.gradients)):
        call = costs.call * row / costs.row
        moves = (copies + late / costs.pieces) * transfer
        calls = received.sum(axis=0) * call
        time += max(max(cold[r] * row, moves) + hot[r] * row + calls[r] for r in range(ranks))
    return time


PROBLEMS = st.tuples(st.sampled_from((2, 4)), st.sampled_from((1, 2, 3))).flatmap(
    lambda shape: st.lists(
        st.lists(st.integers(0, 200), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]),
        min_size=shape[0],
        max_size=shape[0],
    )
)
COSTS = st.builds(
    Costs,
    row=st.floats(0.1, 10),
    token=st.floats(0, 10),
    weights=st.floats(0, 1000),
    gradients=st.floats(0, 1000),
    call=st.floats(0, 100),
    pieces=st.integers(1, 16),
    beyond=st.floats(1, 10),
    nodes=st.tuples(*[st.integers(0, 2)] * 4),
)


@settings(max_examples=60, deadline=None)
@given(PROBLEMS, COSTS, st.integers(1, 3))
def test_the_best_subset_or_none(table, costs, limit):
    """The plan is the best of all subsets, each evaluated row by row."""
    counts = np.array(table)
    costs = replace(costs, nodes=costs.nodes[: len(table)])
    plan = choose(counts, costs, limit)
    before = seconds_of(counts, (), costs)
    every = chain.from_iterable(combinations(range(counts.shape[1]), size) for size in range(1, limit + 1))
    # Each expert has to save 0.25 % of the time, and the plan 3 %.
    values = {
        subset: seconds_of(counts, subset, costs) + 0.0025 * len(subset) * before
        for subset in every
        if all(others(counts, expert) for expert in subset)
    }
    best = min(values.values(), default=before)
    assert plan.before == pytest.approx(before)
    assert plan.after == pytest.approx(seconds_of(counts, plan.experts, costs))
    assert plan.rows == loads_of(counts, plan.experts)
    assert list(plan.experts) == sorted(set(plan.experts))
    if plan.experts:
        assert values[plan.experts] == pytest.approx(best)
        assert plan.after < 0.97 * before
    else:
        assert best >= 0.97 * before * (1 - 1e-9)


def others(counts, expert) -> int:
    """Return the number of rows that other ranks have for an expert."""
    return int(counts[:, expert].sum() - counts[expert // (counts.shape[1] // counts.shape[0]), expert])


def test_equal_experts_are_taken_by_number():
    counts = np.array([[0, 0, 0, 0], [100, 100, 0, 0]])
    assert choose(counts, FREE, 1).experts == (0,)
    assert choose(counts, FREE, 2).experts == (0,)  # moving both would be as bad as moving none


def test_nothing_to_route():
    assert choose(np.zeros((4, 8), dtype=np.int64), FREE, 3).experts == ()


V3 = [torch.Size((2 * 2048, 7168)), torch.Size((7168, 2048))]
"""Weights of one of DeepSeek-V3's experts."""


@pytest.mark.parametrize(
    ("ranks", "nodes", "link", "zipf", "seed", "imbalanced", "before", "moved", "after"),
    [
        (16, 2, 50e9, 0.54, 1, 1.46, 115, 7, 89),
        (32, 4, 50e9, 0.50, 8, 1.86, 148, 10, 93),
        (64, 1, 200e9, 0.24, 4, 1.87, 98, 5, 66),
        (64, 8, 50e9, 0.52, 7, 2.89, 232, 10, 106),
    ],
)
def test_deepseek_v3_moves_as_many_experts_as_pay(
    ranks, nodes, link, zipf, seed, imbalanced, before, moved, after
):
    """256 experts, 4096 tokens a rank, top 8, 200 TFLOP/s, bf16; about these milliseconds."""
    counts = routed(256, 8, ranks, zipf, tokens=256, spread=True, seed=seed) * 16
    assert imbalance(counts) == pytest.approx(imbalanced, abs=0.03)
    rates = Rates(200e12, link, link, link, tuple(rank * nodes // ranks for rank in range(ranks)))
    plan = choose(counts, rates.costs(V3, 7168, torch.bfloat16), 12)
    assert abs(len(plan.experts) - moved) <= 1
    assert 1e3 * plan.before == pytest.approx(before, rel=0.05)
    assert 1e3 * plan.after == pytest.approx(after, rel=0.08)


def test_nothing_moves_where_loads_are_even():
    costs = Rates(400e12, 50e9, 50e9, 50e9, (0,) * 64).costs(V3, 7168, torch.bfloat16)
    assert choose(routed(256, 8, 64, 0.0, tokens=256) * 16, costs).experts == ()


@pytest.mark.parametrize("ranks", [8, 64])
def test_many_experts_are_planned_in_bounded_work(ranks):
    """The search is bounded: a few thousand subsets for any number of ranks."""
    counts = routed(256, 8, ranks, 1.0, tokens=64, spread=True)
    plan = choose(counts, FREE, 8)
    assert len(plan.experts) <= 8
    assert plan.imbalance < imbalance(counts)
    assert choose(counts.copy(), FREE, 8) == plan


def test_nothing_is_searched_where_no_transfer_can_pay(monkeypatch):
    """If the transfer of one expert takes as long as the layer, no set is searched."""
    # With many ranks, a search would take longer than the layer.
    counts = routed(64, 6, 16, 1.0, tokens=64)
    searched = []
    monkeypatch.setattr(planning, "_search", lambda problem, none, limit: searched.append(problem) or none)
    loads = counts.sum(axis=0).reshape(16, -1).sum(axis=1)
    for share, times in ((1.0, 0), (0.9, 1)):
        # Weights and gradients take this share of the busiest rank's time.
        costs = Costs(row=1.0, token=0.0, weights=share * loads.max(), gradients=2 * share * loads.max())
        assert choose(counts, costs, 3).experts == ()
        assert len(searched) == times


def test_without_a_limit_experts_move_until_the_next_does_not_pay():
    counts = routed(64, 6, 16, 0.5, tokens=256, spread=True)
    unlimited = choose(counts, FREE, None)
    assert len(unlimited.experts) > 3
    assert unlimited == choose(counts, FREE, len(unlimited.experts))
    assert unlimited == choose(counts, FREE, len(unlimited.experts) + 1)
    dear = Costs(row=1.0, token=0.0, weights=150.0, gradients=300.0)
    assert 0 < len(choose(counts, dear, None).experts) < len(unlimited.experts)


@pytest.mark.parametrize(
    ("owner", "receivers", "nodes", "chain"),
    [
        (0, (3, 1, 2), (0, 0, 0, 0), (1, 2, 3)),
        (2, (0, 1, 3), (0, 0, 0, 0), (3, 0, 1)),
        (3, range(8), (0, 0, 1, 1, 2, 2, 3, 3), (2, 5, 4, 7, 6, 1, 0)),
        (1, (0, 2, 4, 7), (0, 1, 2, 0, 1, 2, 0, 1), (4, 7, 2, 0)),
        (1, (), (0, 0), ()),
    ],
    ids=("one node", "owner in the middle", "four nodes", "interleaved nodes", "nobody"),
)
def test_a_chain_leaves_each_node_once(owner, receivers, nodes, chain):
    assert chain_of(owner, [rank for rank in receivers if rank != owner], nodes) == chain


def test_owners_of_one_node_leave_it_at_different_ranks():
    """Each rank of two nodes of four sends to the other node for one owner, and receives for one."""
    nodes = (0, 0, 0, 0, 1, 1, 1, 1)
    chains = [(owner, *chain_of(owner, set(range(8)) - {owner}, nodes)) for owner in range(8)]
    crossings = [(a, b) for each in chains for a, b in pairwise(each) if nodes[a] != nodes[b]]
    assert sorted(a for a, _ in crossings) == sorted(b for _, b in crossings) == list(range(8))


def test_nodes_are_numbered_by_hosts_and_gathered_once(pool):
    ranks = pool.run("tests.features.moe.balanced_experts.test_planning:found_nodes", 4)
    assert ranks == [((0, 1, 1, 0), 1)] * 4


def found_nodes() -> tuple[tuple[int, ...], int]:
    """Return what two calls find with four ranks on two hosts, and the number of all-gathers."""
    rank, own = dist.get_rank(), context("balanced-moe-experts")
    gather = mock.patch.object(dist, "all_gather_into_tensor", wraps=dist.all_gather_into_tensor)
    host = mock.patch("socket.gethostname", return_value="east" if rank in (0, 3) else "west")
    with host, gather as gathered:
        first, second = (nodes_of(dist.group.WORLD, own) for _ in range(2))
    assert first == second
    return first, gathered.call_count
