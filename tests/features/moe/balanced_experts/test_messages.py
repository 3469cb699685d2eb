"""Tensors along chains of ranks: copies and ordered sums, which links carry once."""

from __future__ import annotations

import random
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mindspeed_dsa import platforms
from mindspeed_dsa.features.moe.balanced_experts import chains
from mindspeed_dsa.features.moe.balanced_experts.chains import Chains, Flow, Lane, pieces_of
from mindspeed_dsa.features.moe.balanced_experts.weight_transfer import _Announce
from mindspeed_dsa.parallel import names

SIZES = (70, 1, 300)
BATCHES = 4


def run(enqueued: bool) -> dict[str, Any]:
    """Launch batches of random chains, all in flight at once, and return this rank's results and messages."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    drawn, own_time = random.Random(5), random.Random(rank)
    links: Counter[Any] = Counter()
    isend = dist.isend

    def sent(tensor: Any, *arguments: Any, **keywords: Any) -> Any:
        links[names.current().what] += tensor.numel()
        return isend(tensor, *arguments, **keywords)

    found: dict[str, Any] = {"chains": [], "results": [], "links": links}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(chains, "_LEAST_BYTES", 64))
        # Two functions that have to stay the same object: P2POp compares them.
        stack.enter_context(mock.patch.object(dist.distributed_c10d, "isend", sent))
        stack.enter_context(mock.patch.object(dist, "isend", sent))
        if enqueued:
            stack.enter_context(mock.patch.object(type(platforms.current()), "asynchronous", True))
        lane, batches = Lane(), []
        for batch in range(BATCHES):
            flows = []
            for number in range(5):
                path = tuple(drawn.sample(range(ranks), drawn.randint(2, ranks)))
                sums = drawn.random() < 0.5
                flow = Flow(path, f"{batch}, {number}", SIZES, 4)
                if rank in path[1:]:
                    flow.received = [torch.full((size,), torch.nan) for size in SIZES]
                if rank == path[0] or (sums and rank in path[:-1]):
                    flow.own = part_of(batch, number, rank)
                flows.append(flow)
                found["chains"].append((batch, number, path, sums))
            batches.append((Chains(flows, dist.group.WORLD, lane), flows))
            time.sleep(own_time.random() / 50)  # ranks launch at different times
            batches[-1][0].launch()
        for started, flows in batches:
            started.arrive()
            time.sleep(own_time.random() / 50)
            found["results"] += [flow.received for flow in flows]
            started.settle()
            started.settle()  # does nothing
    return found


def part_of(batch: int, number: int, rank: int) -> list[torch.Tensor]:
    """Return the tensors that a rank has at first."""
    noise = torch.Generator().manual_seed(100 * batch + 10 * number + rank)
    return [torch.randn(size, generator=noise) for size in SIZES]


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.full)])
@pytest.mark.parametrize("enqueued", [False, True], ids=["thread", "enqueued"])
def test_copies_and_sums(pool, ranks, enqueued):
    found = pool.run(f"{__name__}:run", ranks, enqueued=enqueued)
    assert len(found[0]["chains"]) == BATCHES * 5
    for index, (batch, number, path, sums) in enumerate(found[0]["chains"]):
        total = part_of(batch, number, path[0])
        for rank in path[1:]:
            last = rank == path[-1]
            if not sums or last:
                received = found[rank]["results"][index]
                assert all(map(torch.equal, received, total)), (path, rank)
            if sums:
                total = [each + mine for each, mine in zip(total, part_of(batch, number, rank), strict=True)]
        for rank in range(ranks):
            # Every rank of the chain but the last sends each element once.
            expected = sum(SIZES) if rank in path[:-1] else 0
            if not enqueued:  # names of one round's messages are joined there
                assert found[rank]["links"][f"{batch}, {number}"] == expected


@pytest.mark.parametrize("sender", [0, 1], ids=["owner", "in the middle"])
def test_a_sender_names_the_chain_whose_receiver_is_lost(pool, sender):
    """The rank before the lost one has received everything; only its send fails."""
    found = pool.run(f"{__name__}:send_to_a_lost_rank", 3, sender=sender)[sender]
    assert found.startswith("weights of expert 5: Connection closed; a rank of this chain has ended or hangs")


def send_to_a_lost_rank(sender: int) -> str:
    """Return the error of a rank whose sends fail as gloo's do when the receiver has ended."""
    rank = dist.get_rank()
    flow = Flow((0, 1, 2), "weights of expert 5", [4], 4)
    setattr(flow, "received" if rank else "own", [torch.ones(4)])
    lost = mock.Mock(**{"wait.side_effect": RuntimeError("Connection closed")})
    with mock.patch.object(dist, "isend", return_value=lost) if rank == sender else ExitStack():
        started = Chains([flow], dist.group.WORLD)
        if rank <= sender:  # no rank waits for a message that nobody sends
            started.launch()
            started.arrive()
        try:
            started.settle()
        except RuntimeError as error:
            return str(error)
    return ""


def test_pieces():
    """One receiver gets one piece; longer chains get more, of a quarter MiB at least."""
    assert pieces_of(1, 1 << 30) == 1
    assert pieces_of(3, 6 << 20) == 16
    assert pieces_of(3, 1 << 20) == 4
    assert pieces_of(63, 88 << 20) == 64
    assert pieces_of(63, 10) == 1


class _Returned:
    """Transfer whose gradient is in ``main_grad`` when it was taken."""

    def collect(self) -> None: ...

    def returns_to(self, parameter: torch.Tensor) -> bool:
        return not parameter.main_grad.any()

    def gradient_of(self, parameter: torch.Tensor) -> None:
        parameter.main_grad += 1


def test_a_parameters_hooks_wait_for_what_other_ranks_return():
    """On a device autograd lets the stream of hooks wait for a gradient only."""
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    parameter.main_grad = torch.zeros(2, 3)
    _Announce.apply(_Returned(), torch.ones(1, requires_grad=True), parameter).backward()
    assert parameter.grad is not None
    assert not parameter.grad.any()
    assert parameter.main_grad.eq(1).all()
