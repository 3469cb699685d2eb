"""Weights of an expert pass along a chain of ranks, and gradients come back in the chain's order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any
from unittest import mock

import pytest
import torch

from tests.features.moe.balanced_experts import popular_experts
from tests.features.moe.balanced_experts.popular_experts import ALWAYS
from tests.features.moe.balanced_experts.test_layer import EXPERT
from tests.support.moe import assert_same

EIGHT = [3.0, 2.0, 2.0, 1.0, 1.0, 0.0, 0.0, -2.0]
SIXTEEN = [3.0, 2.0, 2.0, 1.0, 1.0, 0.0, 0.0, -2.0] * 2
EP4 = {"popularity": [EIGHT, EIGHT[::-1]], "rows": (40,), "ep": 4}


def on_nodes(nodes: Sequence[int], **arguments: Any) -> dict[str, Any]:
    """Train with ranks on these nodes; also return each chain's gradients, and the sums that owners get."""
    from mindspeed_dsa.features.moe.balanced_experts import layer
    from mindspeed_dsa.features.moe.balanced_experts.weight_transfer import WeightTransfer

    sent: list[Any] = []
    sums: list[Any] = []
    send, collect = WeightTransfer.send_gradients, WeightTransfer.collect

    def sending(self: WeightTransfer, gradients: Sequence[torch.Tensor]) -> None:
        sent.append([(expert.number, expert.owner, expert.chain) for expert in self.experts])
        size = len(self._shapes)
        own = {
            expert.number: [gradient.clone() for gradient in gradients[index * size : (index + 1) * size]]
            for index, expert in enumerate(self.received)
        }
        sent[-1] = (sent[-1], own)
        send(self, gradients)

    def collecting(self: WeightTransfer) -> None:
        collect(self)
        if self._returned:
            sums.append([gradient.clone() for _, gradient in self._returned])

    with (
        mock.patch.object(layer, "nodes_of", return_value=tuple(nodes)),
        mock.patch.object(WeightTransfer, "send_gradients", sending),
        mock.patch.object(WeightTransfer, "collect", collecting),
    ):
        return {**popular_experts.train(**arguments), "gradients": sent, "sums": sums}


def run(pool: Any, ranks: int, nodes: Sequence[int], arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all ranks' results, after checking that they are stock Megatron's."""
    stock = pool.run(
        "tests.features.moe.balanced_experts.popular_experts:train", ranks, switches={}, **arguments
    )
    ours = pool.run(f"{__name__}:on_nodes", ranks, nodes=nodes, switches=ALWAYS, **arguments)
    for mine, theirs in zip(ours, stock, strict=True):
        assert_same(mine, theirs, rtol=1e-6)
        assert all(mine["plans"])
    return ours


def assert_links_carry_each_expert_once(
    ours: Sequence[Mapping[str, Any]], numbers: Sequence[int] = range(16)
) -> None:
    """Check the bytes of every link: a rank receives each moved expert once, and sends it on once.

    Args:
        ours: results of all ranks.
        numbers: expert number for each slot.
    """
    moves = Counter(numbers[slot] for plan in ours[0]["plans"] for slot in plan)
    carried: Counter[Any] = Counter()
    for name in {what for rank in ours for _, what in rank["links"]}:
        kind, number, path = re.fullmatch(r"(\w+) of expert (\d+) along ranks (.+)", name).groups()
        ranks = [int(rank) for rank in path.split(" > ")]
        carried[kind, int(number)] += ours[ranks[0]]["links"]["out", name]
        for way, ends in (("out", ranks[:-1]), ("in", ranks[1:])):
            seen = [rank["links"][way, name] for rank in ours]
            assert seen == [seen[ends[0]] * (rank in ends) for rank in range(len(ours))], name
        assert ours[ranks[0]]["links"]["out", name] == ours[ranks[1]]["links"]["in", name] > 0
    for kind in ("weights", "gradients"):
        assert {number: carried[kind, number] for number in moves} == {
            number: 4 * EXPERT * count for number, count in moves.items()
        }


def assert_sums_have_the_order_of_chains(ours: Sequence[Mapping[str, Any]]) -> None:
    """Check each owner's sums, bit by bit: the last rank's gradient, plus the one before, and so on."""
    for rank, results in enumerate(ours):
        expected = []
        for call, (experts, _) in enumerate(results["gradients"]):
            own = [expert for expert in experts if expert[1] == rank]
            if own:
                expected.append([])
            for number, _, chain in own:
                parts = [ours[each]["gradients"][call][1][number] for each in chain[::-1]]
                expected[-1] += [reduce(torch.add, weights) for weights in zip(*parts, strict=True)]
        seen = results["sums"]
        assert len(seen) >= len(expected)
        for sums in expected:
            assert any(len(sums) == len(each) and all(map(torch.equal, sums, each)) for each in seen)


@pytest.mark.parametrize(
    ("ranks", "nodes", "arguments", "paths"),
    [
        (4, (0, 0, 0, 0), EP4, {"along ranks 0 > 1 > 2 > 3"}),
        pytest.param(
            4, (0, 1, 0, 1), EP4, {"along ranks 0 > 2 > 1 > 3", "along ranks 3 > 1 > 2 > 0"},
            marks=pytest.mark.full,
        ),
        pytest.param(
            8, (0,) * 4 + (1,) * 4, {**EP4, "popularity": [SIXTEEN], "ep": 8},
            {"along ranks 0 > 1 > 2 > 3 > 4 > 5 > 6 > 7", "along ranks 4 > 5 > 6 > 7 > 0 > 1 > 2 > 3"},
            marks=pytest.mark.full,
        ),
    ],
    ids=["one node", "two nodes", "8 ranks on two nodes"],
)  # fmt: skip
def test_chains_of_all_ranks(pool, ranks, nodes, arguments, paths):
    ours = run(pool, ranks, nodes, arguments)
    assert_links_carry_each_expert_once(ours)
    assert_sums_have_the_order_of_chains(ours)
    names = {what for rank in ours for _, what in rank["links"]}
    assert all(any(what.endswith(path) for what in names) for path in paths), names


@pytest.mark.full
@pytest.mark.parametrize("frozen", [(0, 1, 5), range(8)], ids=["some", "all"])
def test_frozen_experts(pool, frozen):
    """Frozen experts send their weights along the chain, and no gradients come back."""
    ours = run(pool, 4, (0, 0, 1, 1), {**EP4, "frozen": frozen})
    names = {what for rank in ours for _, what in rank["links"]}
    for number in {number for plan in ours[0]["plans"] for number in plan}:
        for kind in ("weights", "gradients"):
            sent = any(what.startswith(f"{kind} of expert {number} ") for what in names)
            assert sent == (kind == "weights" or number not in frozen)


@pytest.mark.full
def test_one_receiver_gives_the_bits_of_stock(pool):
    """Products of the same rows are equal, wherever they are computed, and a sum of one is exact."""
    # Each rank has tokens for one expert of another rank; rank 0 has two such experts.
    arguments = {
        "popularity": [[[40.0 * (expert == own) for expert in range(8)] for own in (4, 0, 1, 2)]],
        "rows": (12, 40, 24, 30),
        "ep": 4,
        "overrides": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    }
    stock = pool.run("tests.features.moe.balanced_experts.popular_experts:train", 4, switches={}, **arguments)
    ours = pool.run(f"{__name__}:on_nodes", 4, nodes=(0, 0, 0, 0), switches=ALWAYS, **arguments)
    assert ours[0]["plans"][0]
    for mine, theirs in zip(ours, stock, strict=True):
        assert_same(mine, theirs, rtol=0)
