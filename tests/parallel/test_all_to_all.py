"""An all-to-all in two halves moves what Megatron's moves, with room for other work in both directions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.parallel import all_to_all
from tests.support import moe

# -- what runs in the pool's workers ---------------------------------------------------------------


def beside_megatrons(rows: list[list[int]]) -> dict[str, Any]:
    """Values, gradients and the order of events, of two transfers in flight at once.

    Args:
        rows: ``[from][to]``.
    """
    import mindspeed_dsa

    mindspeed_dsa.enable()  # Megatron's asks for a CUDA device
    from megatron.core.tensor_parallel.mappings import _AllToAll

    rank, ranks = dist.get_rank(), dist.get_world_size()
    send, receive = rows[rank], [rows[other][rank] for other in range(ranks)]
    noise = torch.Generator().manual_seed(rank)
    wide, narrow = torch.randn(sum(send), 3, generator=noise), torch.randn(sum(send), generator=noise)
    found: dict[str, Any] = {}

    def leaves() -> list[Tensor]:
        return [each.clone().requires_grad_() for each in (wide, narrow)]

    theirs = leaves()
    outputs = [_AllToAll.apply(dist.group.WORLD, each * 2, receive, send) for each in theirs]
    (outputs[0] * outputs[1][:, None]).square().sum().backward()
    found["theirs"] = [*outputs, *(each.grad for each in theirs)]

    ours, between = leaves(), torch.ones(4, requires_grad=True)
    with moe.transfers() as events:
        flights = [all_to_all.start(each * 2, receive, send, dist.group.WORLD) for each in ours]
        meanwhile = between * 3
        meanwhile.register_hook(lambda grad: events.append("meanwhile"))
        outputs = [flight.wait() for flight in flights]
        found["forward"], events[:] = list(events), []
        loss = (outputs[0] * outputs[1][:, None]).square().sum() + meanwhile.sum()
        loss.backward()
    found["backward"] = events
    found["ours"] = [*outputs, *(each.grad for each in ours)]
    try:
        flights[0].wait()
    except RuntimeError as error:
        found["again"] = str(error)
    for key in ("ours", "theirs"):
        found[key] = [each.detach() for each in found[key]]
    return found


ROWS = {2: [[3, 2], [4, 1]], 3: [[0, 2, 1], [0, 0, 0], [5, 0, 1]]}


@pytest.mark.parametrize("ranks", ROWS)
def test_values_gradients_and_order(pool, ranks):
    """Also of a rank that sends nothing, and of pairs that exchange nothing."""
    for found in pool.run("tests.parallel.test_all_to_all:beside_megatrons", ranks, rows=ROWS[ranks]):
        for ours, theirs in zip(found["ours"], found["theirs"], strict=True):
            assert ours.equal(theirs)
        assert found["forward"] == ["launch", "launch", "wait", "wait"]
        assert found["backward"] == ["launch", "launch", "meanwhile", "wait", "wait"]
        assert "waited for already" in found["again"]
