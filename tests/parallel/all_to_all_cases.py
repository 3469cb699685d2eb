"""An all-to-all started and waited for, beside Megatron's; runs in the pool's workers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.parallel import all_to_all
from tests.support import moe


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
