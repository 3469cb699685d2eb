"""Worker functions: FSDP2 units of plain torch modules, with their events in order."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

UNITS = 5


class Stack(nn.Module):
    """Model whose last unit has six features, so four ranks divide neither its rows nor its bias."""

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
    from mindspeed_dsa.features.data_parallel.fsdp2 import shards

    mesh = shards.mesh_of(dist.group.WORLD, "cpu", dist.get_world_size())
    placements = {
        p: dim for p in model.parameters() if (dim := shards.dimension(p.shape, mesh.size())) is not None
    }
    plan = shards.Plan(mesh, placements, reshard, torch.float32, mesh.size())
    shards.shard(model, list(model.layers), plan)
    shards.prefetch(list(model.layers), ahead, model, asynchronous=True)
    return placements


def _gathers() -> Any:
    name = "foreach_all_gather"
    return mock.patch.object(_fsdp_param_group, name, wraps=getattr(_fsdp_param_group, name))


def recompute() -> int:
    """Return the number of gathers in a step in which every layer is recomputed in backward."""
    model = Stack(recomputed=True)
    _shard(model, ahead=1)
    with _gathers() as gather:
        model(torch.randn(3, 8, requires_grad=True)).sum().backward()
    return gather.call_count


def two_microbatches() -> int:
    """Return the number of gathers in two forwards followed by two backwards, as in a pipeline."""
    model = Stack()
    model.last = nn.Identity()  # The root unit would run between the microbatches, so it gets no parameters.
    _shard(model, ahead=1)
    with _gathers() as gather:
        losses = [model(torch.randn(3, 8)).sum() for _ in range(2)]
        for loss in losses:
            loss.backward()
    return gather.call_count


def evaluate() -> list[bool]:
    """Return whether parameters are shards after an evaluation, although backward keeps weights gathered."""
    model = Stack()
    placements = _shard(model, ahead=1, reshard=False)
    with torch.no_grad():
        model(torch.randn(3, 8))
    assert len(placements) == len(list(model.parameters()))
    return [hasattr(parameter, "placements") for parameter in model.parameters()]


def train(ahead: int) -> dict[str, Any]:
    """Take a step with and without shards; return events, gradient errors, cuts and the peak of gathered
    units.
    """
    whole, model = Stack(), Stack()
    placements = _shard(model, ahead)
    units, mesh = list(model.layers), dist.group.WORLD
    names = {
        id(unit._get_fsdp_state()._fsdp_param_groups[0]): name
        for name, unit in [*enumerate(units), ("root", model)]
    }
    events: list[str] = []
    # FSDP2's private methods, wrapped below to record their order.
    gather, wait = FSDPParamGroup.unshard, FSDPParamGroup.wait_for_unshard
    start = _fsdp_param_group.foreach_reduce
    held = peak = 0

    def unshard(self: Any, *args: Any) -> None:
        before = self._all_gather_result
        gather(self, *args)
        # FSDP2 skips a gather that has already been started.
        if self._all_gather_result is not before:
            events.append(f"gather {names[id(self)]}")

    def wait_for_unshard(self: Any) -> None:
        nonlocal held, peak
        # Record only waits that end a gather.
        waits = self._all_gather_result is not None
        wait(self)
        if waits:
            events.append(f"use {names[id(self)]}")
        held = sum(group.is_unsharded for group in all_groups)
        peak = max(peak, held)

    def reduce(parameters: Any, *args: Any) -> Any:
        (group,) = (candidate for candidate in all_groups if parameters[0] in candidate.fsdp_params)
        events.append(f"reduce {names[id(group)]}")
        return start(parameters, *args)

    all_groups: list[Any] = [u._get_fsdp_state()._fsdp_param_groups[0] for u in (*units, model)]
    # Every rank has other data, so gradients differ before their reduction.
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    with (
        mock.patch.object(FSDPParamGroup, "unshard", unshard),
        mock.patch.object(FSDPParamGroup, "wait_for_unshard", wait_for_unshard),
        mock.patch.object(_fsdp_param_group, "foreach_reduce", reduce),
    ):
        loss = model(x).square().sum()
        events.append("backward")
        loss.backward()
    whole(x).square().sum().backward()
    errors = {}
    for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert ours.grad is not None
        if ours not in placements and not hasattr(ours, "placements"):
            # An unsharded gradient, which the caller has to reduce.
            errors[name] = float((ours.grad - theirs.grad).abs().max())
            continue
        # FSDP2 averages gradients over ranks.
        dist.all_reduce(theirs.grad)
        errors[name] = float((ours.grad.full_tensor() - theirs.grad / mesh.size()).abs().max())
    cuts = {
        name: str(p.placements) if hasattr(p, "placements") else "" for name, p in model.named_parameters()
    }
    return {"events": events, "errors": errors, "cuts": cuts, "peak": peak}


class Mixed(nn.Module):
    """Module with a large weight, a small one, and one that two ranks cut by columns."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(192, 512, dtype=dtype)
        self.odd = nn.Parameter(torch.randn(3, 512, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh() @ self.odd.t()


def _mixed(dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the model, and the check of its first gradients."""
    from mindspeed_dsa.features.data_parallel.fsdp2 import shards

    model = Mixed(dtype)
    mesh = shards.mesh_of(dist.group.WORLD, "cpu", 2)
    placements = {p: shards.dimension(p.shape, 2) for p in model.parameters()}
    plan = shards.Plan(mesh, placements, True, torch.float32, 2)  # type: ignore[arg-type]
    return model, shards.shard(model, [], plan)


def renamed() -> dict[str, str]:
    """Return errors about private FSDP2 names that changed, by kind of change."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    from mindspeed_dsa.features.data_parallel.fsdp2 import pairs
    from mindspeed_dsa.patches.errors import SettingsError

    def another(self: Any, reason: str) -> None:
        raise AssertionError(reason)

    @contextlib.contextmanager
    def gone(base: Any, name: str) -> Any:
        method = vars(base)[name]
        delattr(base, name)
        try:
            yield
        finally:
            setattr(base, name, method)

    said = {}
    for what, change in (
        ("as it is", contextlib.nullcontext()),
        ("method", gone(FSDPState, "_root_post_backward_final_callback")),
        ("parameters", mock.patch.object(FSDPState, "_root_post_backward_final_callback", another)),
    ):
        said[what] = ""
        model, _ = _mixed(torch.float32)
        with change:
            try:
                pairs.Model(model, [])
            except SettingsError as error:
                said[what] = str(error)
    return said


def first_gradients() -> dict[str, str]:
    """Return the errors after the first backward, by FSDP2 behaviour that is missing."""
    from mindspeed_dsa.features.data_parallel.fsdp2 import shards
    from mindspeed_dsa.patches.errors import SettingsError

    # Stand-ins for private functions that a newer FSDP2 no longer calls, or whose result it ignores.
    def reduces_nothing(self: Any, *unused: Any) -> None: ...

    def has_no_effect(dtype: torch.dtype, groups: Any) -> None: ...

    said = {}
    for what, change in (
        ("as it is", contextlib.nullcontext()),
        ("reduction not called", mock.patch.object(FSDPParamGroup, "post_backward", reduces_nothing)),
        ("type not read", mock.patch.object(shards, "_keep_sums_in", has_no_effect)),
    ):
        said[what] = ""
        with change:
            model, first = _mixed(torch.bfloat16)
            first.check()  # no gradients yet
            model(torch.ones(5, 192, dtype=torch.bfloat16)).float().square().sum().backward()
            try:
                first.check()
            except SettingsError as error:
                said[what] = str(error)
    return said


class Written(TorchDispatchMode):
    """Counts elements that operators write to memory passed as an argument."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Positional arguments, then keyword-only arguments.
        for argument, value in zip(func._schema.arguments, args, strict=False):
            self._count(argument, value)
        for argument in func._schema.arguments:
            if argument.kwarg_only and argument.name in (kwargs or {}):
                self._count(argument, kwargs[argument.name])
        return func(*args, **(kwargs or {}))

    def _count(self, argument: Any, value: Any) -> None:
        if argument.alias_info is not None and argument.alias_info.is_write:
            self.elements += sum(each.numel() for each in pytree.tree_leaves(value))


def copy_out() -> dict[str, Any]:
    """Compare stock and one-pass copy-out of FSDP2's gather buffer: weights, and passes over them."""
    from mindspeed_dsa.features.data_parallel.fsdp2.copy_out import in_one_pass

    plain, results = Mixed(torch.float32), {}
    stock = _fsdp_param_group.foreach_all_gather_copy_out
    for name, function in (("FSDP2", stock), ("one pass", in_one_pass(stock))):
        model, _ = _mixed(torch.float32)
        (group,) = model._get_fsdp_state()._fsdp_param_groups
        with torch.no_grad(), mock.patch.object(_fsdp_param_group, "foreach_all_gather_copy_out", function):
            group.unshard()
            with Written() as written:
                group.wait_for_unshard()
            results[name] = {
                # 1 if every element is written once.
                "written": written.elements / sum(each.numel() for each in plain.parameters()),
                "weight": torch.equal(model.linear.weight, plain.linear.weight),
                "odd": torch.equal(model.odd, plain.odd),
                "bias": torch.equal(model.linear.bias, plain.linear.bias),
            }
            model.reshard()
    return results
