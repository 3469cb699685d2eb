"""Process group cases: gathered rows, their gradients, and the memory in use meanwhile."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mindspeed_dsa.context_parallel.gather import GatheredRows, KeyGather, Members, freed_until_backward
from mindspeed_dsa.context_parallel.layout import Zigzag, rows_of_all

LENGTH, BATCH, WIDTH = 48, 2, 3


def gathered(tensor_ranks: int = 1, block_rows: int = 0, dtype: str = "float64", freed: bool = False) -> Any:
    """Check one gather with a gradient that differs between ranks.

    Returns:
        Result of each comparison, and the number of runs of each member.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    layout = Zigzag(world // tensor_ranks, block_rows)
    members = Members.of(dist.group.WORLD, layout, LENGTH)
    whole = torch.randn(LENGTH, BATCH, WIDTH, generator=torch.manual_seed(0)).to(getattr(torch, dtype))
    rows = rows_of_all(layout, LENGTH).view(world, -1)[rank]
    local = whole[rows].clone().requires_grad_()
    ours = GatheredRows(local, members)
    result = ours.wait()
    facts = {"forward": bool(torch.equal(result, whole)), "runs": len(members.runs)}
    weights = torch.randn(world, LENGTH, BATCH, WIDTH, generator=torch.manual_seed(1)).to(whole.dtype)
    out = (result.transpose(0, 1) * weights[rank].transpose(0, 1)).square()
    if freed:
        out = freed_until_backward(out, [ours])
        facts["freed"] = result.untyped_storage().size() == 0
    out.sum().backward()
    theirs = (2 * whole.double() * weights.double().square()).sum(dim=0)[rows]
    facts["backward"] = float((local.grad.double() - theirs).abs().max() / theirs.abs().max())
    return facts


def summed_over_context_ranks() -> list[bool]:
    """Return whether two tensor parallel ranks with equal gradients of four ranks' rows count once."""
    world, rank = dist.get_world_size(), dist.get_rank()
    context = [dist.new_group([tensor, tensor + 2]) for tensor in (0, 1)][rank % 2]
    members = Members.of(dist.group.WORLD, Zigzag(2), LENGTH)
    local = torch.ones(LENGTH // world, requires_grad=True)
    whole = GatheredRows(local, members, members.part(context, rank % 2)).wait()
    (whole * torch.arange(LENGTH) * (1 + rank // 2)).sum().backward()
    return [torch.equal(local.grad, 3.0 * members.rows[rank])]


def sum_of_narrow_parts(with_receiver: bool) -> float:
    """Return a bfloat16 row's gradient: the parts of two ranks cancel but for bits that bfloat16 drops."""
    members = Members.of(dist.group.WORLD, Zigzag(2), LENGTH)
    local = torch.ones(LENGTH // 2, dtype=torch.bfloat16, requires_grad=True)
    whole, receiver = GatheredRows(local, members).wait_with_receiver()
    part = torch.full((LENGTH,), 1 + 2.0**-9 if dist.get_rank() == 0 else -1.0)
    taker = receiver if with_receiver else whole
    torch.autograd.backward(taker, part.to(taker.dtype))
    assert local.grad.unique().numel() == 1
    return float(local.grad[0])


def order_of_backward() -> list[str]:
    """Return the events of backward in order, when forward has a product between start and wait."""
    from mindspeed_dsa.context_parallel import gather

    events: list[str] = []

    def told(name: str) -> None:
        original = getattr(gather._Transfer, name)

        def tell(self: Any, *args: Any) -> Any:
            events.append(name)
            return original(self, *args)

        setattr(gather._Transfer, name, tell)

    before = {name: getattr(gather._Transfer, name) for name in ("start_sum", "summed")}
    try:
        for name in before:
            told(name)
        local = torch.randn(LENGTH // dist.get_world_size(), requires_grad=True)
        keys = GatheredRows(local * 2, KeyGather(dist.group.WORLD).members(LENGTH))
        product = local * 3
        product.register_hook(lambda gradient: events.append("product"))
        (keys.wait().sum() + product.sum()).backward()
    finally:
        for name, original in before.items():
            setattr(gather._Transfer, name, original)
    return events


def rolled_rows(block_rows: int) -> bool:
    """Return whether every row got the next row of the sequence, as when Megatron rolls a whole one."""
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    from mindspeed_dsa.context_parallel.layout import rolled, split

    layout, rank = Zigzag(dist.get_world_size(), block_rows), dist.get_rank()
    whole = torch.randint(1, 100, (BATCH, LENGTH), generator=torch.manual_seed(0))
    ours = rolled(split(whole, layout, rank, dim=1), 1, dist.group.WORLD, layout)
    return torch.equal(ours, split(roll_tensor(whole)[0], layout, rank, dim=1))
