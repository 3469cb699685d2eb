"""An all-to-all in two halves moves the same rows as Megatron's, and overlaps other work both ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.parallel import all_to_all
from tests.support import moe

# -- functions that run in the pool's workers ------------------------------------------------------


def beside_megatrons(rows: list[list[int]]) -> dict[str, Any]:
    """Return values, gradients and the order of events of two transfers in flight at once.

    Args:
        rows: number of rows, ``[sender][receiver]``.
    """
    import mindspeed_dsa

    mindspeed_dsa.enable()  # Megatron's all-to-all asks for a CUDA device
    from megatron.core.tensor_parallel.mappings import _AllToAll

    rank, ranks = dist.get_rank(), dist.get_world_size()
    send, receive = rows[rank], [rows[other][rank] for other in range(ranks)]
    noise = torch.Generator().manual_seed(rank)
    wide, narrow = torch.randn(sum(send), 3, generator=noise), torch.randn(sum(send), generator=noise)
    result: dict[str, Any] = {}

    def leaves() -> list[Tensor]:
        return [tensor.clone().requires_grad_() for tensor in (wide, narrow)]

    theirs = leaves()
    outputs = [_AllToAll.apply(dist.group.WORLD, leaf * 2, receive, send) for leaf in theirs]
    (outputs[0] * outputs[1][:, None]).square().sum().backward()
    result["theirs"] = [*outputs, *(leaf.grad for leaf in theirs)]

    ours, between = leaves(), torch.ones(4, requires_grad=True)
    with moe.transfers() as events:
        flights = [all_to_all.start(leaf * 2, receive, send, dist.group.WORLD) for leaf in ours]
        meanwhile = between * 3
        meanwhile.register_hook(lambda grad: events.append("meanwhile"))
        outputs = [flight.wait() for flight in flights]
        result["forward"], events[:] = list(events), []
        loss = (outputs[0] * outputs[1][:, None]).square().sum() + meanwhile.sum()
        loss.backward()
    result["backward"] = events
    result["ours"] = [*outputs, *(leaf.grad for leaf in ours)]
    try:
        flights[0].wait()
    except RuntimeError as error:
        result["again"] = str(error)
    for key in ("ours", "theirs"):
        result[key] = [leaf.detach() for leaf in result[key]]
    return result


ROWS = {2: [[3, 2], [4, 1]], 3: [[0, 2, 1], [0, 0, 0], [5, 0, 1]]}


@pytest.mark.parametrize("ranks", ROWS)
def test_values_gradients_and_order(pool, ranks):
    """Includes a rank that sends nothing, and pairs that exchange nothing."""
    for result in pool.run("tests.parallel.test_all_to_all:beside_megatrons", ranks, rows=ROWS[ranks]):
        for ours, theirs in zip(result["ours"], result["theirs"], strict=True):
            assert ours.equal(theirs)
        assert result["forward"] == ["launch", "launch", "wait", "wait"]
        assert result["backward"] == ["launch", "launch", "meanwhile", "wait", "wait"]
        assert "waited for already" in result["again"]
