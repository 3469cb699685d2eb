"""Copies of a token that dispatchers send, against random routing, and the time of transfers on links."""

from __future__ import annotations

import random

import pytest

from mindspeed_dsa.tools.planner import arguments, communication, links
from mindspeed_dsa.tools.planner.communication import Transfer
from mindspeed_dsa.tools.planner.devices import device
from mindspeed_dsa.tools.planner.routing import Routing, copies
from tests.tools.planner.jobs import deepseek

DRAWS = 20_000


def drawn(experts, topk, groups, group_topk, parts):
    """Return the mean number of parts that random tokens are sent to."""
    source, sums = random.Random(1), 0
    size = experts // max(1, groups)
    for _ in range(DRAWS):
        chosen = source.sample(range(groups), group_topk) if groups > 1 else [0]
        candidates = [group * size + place for group in chosen for place in range(size)]
        sums += len({expert * parts // experts for expert in source.sample(candidates, topk)})
    return sums / DRAWS


@pytest.mark.parametrize(
    ("routing", "parts"),
    [
        ((128, 8, 1, 1), 2),
        pytest.param((128, 8, 1, 1), 16, marks=pytest.mark.full),
        pytest.param((8, 2, 1, 1), 8, marks=pytest.mark.full),
        pytest.param((256, 8, 8, 4), 4, marks=pytest.mark.full),
        ((256, 8, 8, 4), 8),
        ((256, 8, 8, 4), 64),
        pytest.param((64, 6, 4, 2), 2, marks=pytest.mark.full),
    ],
)
def test_copies_are_those_of_random_routing(routing, parts):
    assert copies(Routing(*routing), parts) == pytest.approx(drawn(*routing, parts), rel=0.01)


def test_copies_of_simple_routings():
    assert copies(Routing(64, 6, 0, 0), 1) == 1
    # Two of eight experts, one on each rank: always two ranks.
    assert copies(Routing(8, 2, 0, 0), 8) == pytest.approx(2)
    # A token's eight experts come from four of eight groups, one on each node.
    assert copies(Routing(256, 8, 8, 4), 8) <= 4 < copies(Routing(256, 8, 1, 1), 8)
    # All groups are as no groups.
    assert copies(Routing(256, 8, 8, 8), 8) == copies(Routing(256, 8, 1, 1), 8)


def test_neighbours_travel_to_one_or_two_ranks():
    """A token has the experts from a multiple of eight on: 16 experts on a rank, then 4."""
    for experts, parts, ranks in ((128, 8, 1), (256, 64, 2)):
        assert copies(Routing(experts, 8, neighbours=True), parts) == ranks
        own = [
            {(8 * token + place) % experts * parts // experts for place in range(8)} for token in range(64)
        ]
        assert {len(each) for each in own} == {ranks}


QWEN = "pretrain_gpt.py --seq-length 4096 --micro-batch-size 1 --bf16 --global-batch-size 64"


def transfers(more):
    job = arguments.job_of([*QWEN.split(), *more.split()], 16, "qwen3-30b-a3b", imbalance=1.0)
    sent = [each for each in communication.of_job(job)[0] if each.what == "dispatch"]
    return job, sent[0]


def test_flex_sends_a_token_once_to_each_node_and_rank():
    layout = "--expert-model-parallel-size 16 --moe-token-dispatcher-type"
    job, every = transfers(f"{layout} alltoall")
    flex, once = transfers(f"{layout} flex")
    ranks, nodes = copies(Routing(128, 8, 0, 0), 16), copies(Routing(128, 8, 0, 0), 2)
    assert once.nbytes == pytest.approx(every.nbytes * ranks / 8)
    h100 = device("h100")
    # A node's ranks hold 64 of the 128 experts: nearly every token has experts on both nodes.
    assert nodes == pytest.approx(2, rel=0.01)
    over_network = every.nbytes / 8 / (15 / 16) * nodes / 2
    slow = device("h100", network=1.0)
    assert links.seconds(flex, slow, once) == pytest.approx(over_network / (slow.networking * 1e9))
    quick = device("h100", network=1e6)
    assert links.seconds(flex, quick, once) == pytest.approx(once.nbytes / (quick.link * quick.linking * 1e9))
    assert links.seconds(flex, h100, once) < 0.3 * links.seconds(job, h100, every)


def test_groups_of_nodes_bound_what_leaves_a_node():
    words = "--expert-model-parallel-size 64 --moe-token-dispatcher-type flex"
    free = deepseek(f"{words} --moe-router-num-groups 1 --moe-router-group-topk 1", 1024)
    bound = deepseek(f"{words} --moe-router-num-groups 8 --moe-router-group-topk 4", 1024)
    slow = device("h200", network=1.0)
    spent = [
        sum(
            links.seconds(job, slow, each)
            for each in communication.of_job(job)[1]
            if each.what in ("dispatch", "combine")
        )
        for job in (free, bound)
    ]
    assert spent[1] / spent[0] == pytest.approx(
        copies(Routing(256, 8, 8, 4), 8) / copies(Routing(256, 8, 1, 1), 8)
    )


def test_a_ring_uses_the_network_devices_of_all_its_ranks_in_a_node():
    """DP 32 beside TP 1 has 8 ranks in a node, beside TP 8 only one."""
    h200 = device("h200")
    wide = deepseek()
    narrow = deepseek("--tensor-model-parallel-size 8 --sequence-parallel --expert-tensor-parallel-size 1")
    for job, inside in ((wide, 8), (narrow, 1)):
        assert links.strides(job)["DP"][1] == (1 if inside == 8 else 8)
        for collective in ("all-gather", "reduce-scatter", "all-reduce"):
            moved = Transfer("DP", collective, "gradients", 1e9, "end")
            rate = min(h200.link * h200.linking, inside * h200.network * h200.networking) * 1e9
            assert links.seconds(job, h200, moved) == pytest.approx(1e9 / rate)
        # A message to one neighbour has one network device.
        alone = links.seconds(wide, h200, Transfer("DP", "send", "keys", 1e9, "forward"))
        assert alone == pytest.approx(1 / (h200.network * h200.networking))
