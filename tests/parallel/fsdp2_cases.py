"""What runs inside the pool's workers: units of plain torch, with their events in order."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

UNITS = 5


class Stack(nn.Module):
    """Units of six features on one side: no number of rows or columns that four divides."""

    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recomputed = recomputed
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(UNITS))
        self.last = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = (checkpoint(layer, x, use_reentrant=True) if self.recomputed else layer(x)).sin()
        return self.last(x)


def _shard(model: Stack, ahead: int, reshard: bool = True) -> dict[nn.Parameter, int]:
    from mindspeed_dsa.parallel import fsdp2_prefetch, fsdp2_shards

    mesh = fsdp2_shards.mesh_of(dist.group.WORLD, "cpu", dist.get_world_size())
    placements = {
        p: dim
        for p in model.parameters()
        if (dim := fsdp2_shards.dimension(p.shape, mesh.size())) is not None
    }
    plan = fsdp2_shards.Plan(mesh, placements, reshard, torch.float32, mesh.size(), exchange=True)
    fsdp2_shards.shard(model, list(model.layers), plan)
    fsdp2_prefetch.prefetch(list(model.layers), ahead, model, asynchronous=True)
    return placements


def recompute() -> int:
    """Gathers of a step whose layers each run again in backward."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

    model = Stack(recomputed=True)
    _shard(model, ahead=1)
    with mock.patch.object(groups, "foreach_all_gather", wraps=groups.foreach_all_gather) as gather:
        model(torch.randn(3, 8, requires_grad=True)).sum().backward()
    return gather.call_count


def evaluate() -> list[bool]:
    """Whether parameters are shards after a forward pass alone, where weights are kept for backward."""
    model = Stack()
    placements = _shard(model, ahead=1, reshard=False)
    with torch.no_grad():
        model(torch.randn(3, 8))
    assert len(placements) == len(list(model.parameters()))
    return [hasattr(parameter, "placements") for parameter in model.parameters()]


def train(ahead: int) -> dict[str, Any]:
    """A step of a stack, sharded and not: events, gradients, and how much was whole at a time."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

    whole, model = Stack(), Stack()
    placements = _shard(model, ahead)
    units, mesh = list(model.layers), dist.group.WORLD
    names = {
        id(unit._get_fsdp_state()._fsdp_param_groups[0]): name
        for name, unit in [*enumerate(units), ("root", model)]
    }
    events: list[str] = []
    group = groups.FSDPParamGroup
    gather, wait, reduce = group.unshard, group.wait_for_unshard, groups.foreach_reduce
    held = peak = 0

    def unshard(self: Any, *args: Any) -> None:
        before = self._all_gather_result
        gather(self, *args)
        if self._all_gather_result is not before:
            events.append(f"gather {names[id(self)]}")
            assert self._all_gather_result.all_gather_work is not None, "asynchronous"

    def wait_for_unshard(self: Any) -> None:
        nonlocal held, peak
        waits = self._all_gather_result is not None
        wait(self)
        if waits:
            events.append(f"use {names[id(self)]}")
        held = sum(each.is_unsharded for each in all_groups)
        peak = max(peak, held)

    def foreach_reduce(*args: Any, **kwargs: Any) -> Any:
        events.append("reduce")
        return reduce(*args, **kwargs)

    all_groups = [u._get_fsdp_state()._fsdp_param_groups[0] for u in (*units, model)]
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    with (
        mock.patch.object(group, "unshard", unshard),
        mock.patch.object(group, "wait_for_unshard", wait_for_unshard),
        mock.patch.object(groups, "foreach_reduce", foreach_reduce),
    ):
        loss = model(x).square().sum()
        events.append("backward")
        loss.backward()
    whole(x).square().sum().backward()
    errors = {}
    for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert ours.grad is not None
        if ours not in placements and not hasattr(ours, "placements"):
            errors[name] = float((ours.grad - theirs.grad).abs().max())  # its own, for the caller to reduce
            continue
        dist.all_reduce(theirs.grad)
        errors[name] = float((ours.grad.full_tensor() - theirs.grad / mesh.size()).abs().max())
    cuts = {
        name: str(p.placements) if hasattr(p, "placements") else "" for name, p in model.named_parameters()
    }
    return {"events": events, "errors": errors, "cuts": cuts, "peak": peak}
