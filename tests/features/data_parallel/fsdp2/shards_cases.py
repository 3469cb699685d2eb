"""What runs inside the pool's workers: units of plain torch, with their events in order."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.support.counting import logged

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
    from mindspeed_dsa.features.data_parallel.fsdp2 import shards

    mesh = shards.mesh_of(dist.group.WORLD, "cpu", dist.get_world_size())
    placements = {
        p: dim for p in model.parameters() if (dim := shards.dimension(p.shape, mesh.size())) is not None
    }
    plan = shards.Plan(mesh, placements, reshard, torch.float32, mesh.size(), direct=True)
    shards.shard(model, list(model.layers), plan)
    shards.prefetch(list(model.layers), ahead, model, asynchronous=True)
    return placements


def recompute() -> int:
    """Gathers of a step whose layers each run again in backward."""
    from mindspeed_dsa.features.data_parallel.fsdp2 import transfers as fsdp2_direct

    model = Stack(recomputed=True)
    _shard(model, ahead=1)
    with mock.patch.object(fsdp2_direct, "gather", wraps=fsdp2_direct.gather) as gather:
        model(torch.randn(3, 8, requires_grad=True)).sum().backward()
    return gather.call_count


def two_microbatches() -> int:
    """Gathers of two forward passes and then of their two backwards, as in a pipeline."""
    from mindspeed_dsa.features.data_parallel.fsdp2 import transfers as fsdp2_direct

    model = Stack()
    model.last = nn.Identity()  # nothing is left with the root, which ran between the microbatches
    _shard(model, ahead=1)
    with mock.patch.object(fsdp2_direct, "gather", wraps=fsdp2_direct.gather) as gather:
        losses = [model(torch.randn(3, 8)).sum() for _ in range(2)]
        for loss in losses:
            loss.backward()
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
    from mindspeed_dsa.features.data_parallel.fsdp2.transfers import DirectGroup, Reduction

    whole, model = Stack(), Stack()
    placements = _shard(model, ahead)
    units, mesh = list(model.layers), dist.group.WORLD
    names = {
        id(unit._get_fsdp_state()._fsdp_param_groups[0]): name
        for name, unit in [*enumerate(units), ("root", model)]
    }
    events: list[str] = []
    gather, wait = DirectGroup.unshard, DirectGroup.wait_for_unshard
    start, finish = Reduction.__init__, Reduction.finish
    held = peak = 0

    def unshard(self: Any, *args: Any) -> None:
        before = self._all_gather_result
        gather(self, *args)
        if self._all_gather_result is not before:
            events.append(f"gather {names[id(self)]}")

    def wait_for_unshard(self: Any) -> None:
        nonlocal held, peak
        waits = self._all_gather_result is not None
        wait(self)
        if waits:
            events.append(f"use {names[id(self)]}")
        held = sum(each.is_unsharded for each in all_groups)
        peak = max(peak, held)

    def reduce(self: Any, unit: Any, *args: Any) -> None:
        events.append(f"reduce {names[id(unit)]}")
        start(self, unit, *args)

    def finish_reduction(self: Any) -> None:
        events.append(f"sum of {names[id(self.unit)]}")
        finish(self)

    all_groups = [u._get_fsdp_state()._fsdp_param_groups[0] for u in (*units, model)]
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    with (
        mock.patch.object(DirectGroup, "unshard", unshard),
        mock.patch.object(DirectGroup, "wait_for_unshard", wait_for_unshard),
        mock.patch.object(Reduction, "__init__", reduce),
        mock.patch.object(Reduction, "finish", finish_reduction),
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


class Mixed(nn.Module):
    """On two ranks: a weight whose pieces travel alone, a small one, and one that is cut on its columns."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(192, 512, dtype=dtype)
        self.odd = nn.Parameter(torch.randn(3, 512, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh() @ self.odd.t()


def _mixed(dtype: torch.dtype, direct: bool) -> Any:
    return _mixed_with_first_gradients(dtype, direct)[0]


def _mixed_with_first_gradients(dtype: torch.dtype, direct: bool) -> tuple[Any, Any]:
    from mindspeed_dsa.features.data_parallel.fsdp2 import shards

    model = Mixed(dtype)
    mesh = shards.mesh_of(dist.group.WORLD, "cpu", 2)
    placements = {p: shards.dimension(p.shape, 2) for p in model.parameters()}
    plan = shards.Plan(mesh, placements, True, torch.float32, 2, direct=direct)  # type: ignore[arg-type]
    return model, shards.shard(model, [], plan)


def same_bits(dtype: torch.dtype, apart: bool = False) -> dict[str, Any]:
    """What gathers and reductions by messages find, against FSDP2's own, over two microbatches.

    Args:
        dtype: of the weights.
        apart: replicas add up their sums after the second microbatch alone.
    """
    from mindspeed_dsa.features.data_parallel.fsdp2.transfers import DirectGroup

    found = []
    for direct in (False, True):
        model = _mixed(dtype, direct)
        (group,) = model._get_fsdp_state()._fsdp_param_groups
        assert isinstance(group, DirectGroup) is direct
        noise = torch.Generator().manual_seed(dist.get_rank())
        outputs: list[torch.Tensor] = []
        for last in (False, True):
            model.set_requires_all_reduce(last or not apart)
            outputs.append(model(torch.randn(5, 192, generator=noise).to(dtype)))
            outputs[-1].float().square().sum().backward()
        gradients = [parameter.grad._local_tensor for parameter in model.parameters()]
        assert all(gradient.dtype == torch.float32 for gradient in gradients)
        found.append([*outputs, *gradients])
    return {
        "equal": [torch.equal(ours, theirs) for theirs, ours in zip(*found, strict=True)],
        "nonzero": all(bool(each.any()) for each in found[0]),
    }


def failed_step() -> list[bool]:
    """Whether gradients are those without a backward before them that failed half way and was given up."""
    from mindspeed_dsa.features.data_parallel.fsdp2 import shards

    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError

    def fail_behind(layer: Any, args: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    found = []
    for fails in (False, True):
        model = Stack()
        _shard(model, ahead=1)
        if fails:
            handle = model.layers[1].register_forward_hook(fail_behind)
            with contextlib.suppress(ArithmeticError):
                model(torch.ones(3, 8)).sum().backward()
            handle.remove()
            model.reset_iter_state()  # type: ignore[operator]
            model.zero_grad()
        model(torch.ones(3, 8)).sum().backward()
        found.append(shards.sharded_gradients(model))
    return [torch.equal(ours, theirs) for theirs, ours in zip(*found, strict=True)]


def renamed() -> dict[str, str]:
    """What is said of private names of FSDP2's that are not what they were, by what has become of them."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
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

    def convert() -> None:
        _mixed(torch.float32, direct=True)

    def in_parts() -> None:
        model = _mixed(torch.float32, direct=False)
        pairs.Model(model, [])

    said = {}
    for what, change, use in (
        ("as it is", contextlib.nullcontext(), convert),
        ("as it is, in parts", contextlib.nullcontext(), in_parts),
        ("method", gone(FSDPParamGroup, "finalize_backward"), convert),
        ("parameters", mock.patch.object(FSDPParamGroup, "unshard", another), convert),
        ("of a state", gone(FSDPState, "_root_post_backward_final_callback"), in_parts),
    ):
        said[what] = ""
        with change:
            try:
                use()
            except SettingsError as error:
                said[what] = str(error)
    return said


def first_gradients() -> dict[str, str]:
    """What is said after the first backward, by what FSDP2 no longer does."""
    from mindspeed_dsa.features.data_parallel.fsdp2 import shards
    from mindspeed_dsa.features.data_parallel.fsdp2.transfers import DirectGroup
    from mindspeed_dsa.patches.errors import SettingsError

    # Stand for what nobody calls or reads any more.
    def not_called(self: Any) -> None: ...

    def reduces_nothing(self: Any, *unused: Any) -> None: ...

    def has_no_effect(dtype: torch.dtype, groups: Any) -> None: ...

    said = {}
    for what, direct, change in (
        ("messages", True, contextlib.nullcontext()),
        ("collectives", False, contextlib.nullcontext()),
        ("end not called", True, mock.patch.object(DirectGroup, "finalize_backward", not_called)),
        ("reduction not called", True, mock.patch.object(DirectGroup, "post_backward", reduces_nothing)),
        ("type not read", False, mock.patch.object(shards, "_keep_sums_in", has_no_effect)),
    ):
        said[what] = ""
        with change:
            model, first = _mixed_with_first_gradients(torch.bfloat16, direct)
            first.check()  # nothing is there yet
            model(torch.ones(5, 192, dtype=torch.bfloat16)).float().square().sum().backward()
            try:
                first.check()
            except SettingsError as error:
                said[what] = str(error)
        model.reset_iter_state()  # messages under way write to memory that would go with the model
    return said


def untried() -> dict[str, Any]:
    """A release that nobody has tried: what its groups are, what is said, and the bits."""
    from mindspeed_dsa import log
    from mindspeed_dsa.features.data_parallel.fsdp2.transfers import DirectGroup

    log.forget()
    with logged("mindspeed_dsa.fsdp2") as said:
        known = _mixed(torch.float32, direct=True)
        with mock.patch.object(torch, "__version__", "9.0.0"):
            models = [_mixed(torch.float32, direct=True) for _ in range(2)]
    gradients = []
    for model in (known, *models):
        model(torch.ones(5, 192)).square().sum().backward()
        gradients.append([parameter.grad._local_tensor for parameter in model.parameters()])
    return {
        "direct": [
            isinstance(group, DirectGroup)
            for model in (known, *models)
            for group in model._get_fsdp_state()._fsdp_param_groups
        ],
        "said": said,
        "equal": [
            torch.equal(*pair) for each in gradients[1:] for pair in zip(gradients[0], each, strict=True)
        ],
    }


class Written(TorchDispatchMode):
    """Elements that operators write to memory that they are given."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
    """Weights and passes over them, out of FSDP2's buffer and of messages."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

    from mindspeed_dsa.features.data_parallel.fsdp2.copy_out import in_one_pass

    plain, found = Mixed(torch.float32), {}
    for name, direct, function in (
        ("FSDP2", False, groups.foreach_all_gather_copy_out),
        ("one pass", False, in_one_pass(groups.foreach_all_gather_copy_out)),
        ("messages", True, groups.foreach_all_gather_copy_out),
    ):
        model = _mixed(torch.float32, direct)
        (group,) = model._get_fsdp_state()._fsdp_param_groups
        with torch.no_grad(), mock.patch.object(groups, "foreach_all_gather_copy_out", function):
            group.unshard()
            with Written() as written:
                group.wait_for_unshard()
            found[name] = {
                "written": written.elements / sum(each.numel() for each in plain.parameters()),
                "weight": torch.equal(model.linear.weight, plain.linear.weight),
                "odd": torch.equal(model.odd, plain.odd),
                "bias": torch.equal(model.linear.bias, plain.linear.bias),
            }
            model.reshard()
    return found
