"""FSDP2 with shards of equal size on whatever dimension has them, and gathers ahead of what hides them.

Gradients are summed in their own type. Nothing here knows Megatron: any job's ``FSDPModule`` will do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Shard

from mindspeed_dsa.features.data_parallel.fsdp2 import checks
from mindspeed_dsa.megatron.gathered_weights import runs_apart
from mindspeed_dsa.parallel.groups import subgroup
from mindspeed_dsa.parallel.local_shards import like, local_of
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.errors import SettingsError


def mesh_of(group: Any, device_type: str, sharding_size: int) -> DeviceMesh:
    """Make the mesh ``[replicas, shards]``, or ``[shards]`` alone where there is one replica.

    Consecutive ranks of the group share a replica: ranks that lie next to each other have the fastest links.

    Args:
        group: process group of all data parallel ranks.
        device_type: of the parameters.
        sharding_size: ranks that share one copy; divides the group's size.
    """
    ranks = dist.get_process_group_ranks(group)
    if sharding_size == len(ranks):
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=("shard",))
    grid = torch.tensor(ranks).view(-1, sharding_size)
    row, column = divmod(ranks.index(dist.get_rank()), sharding_size)
    groups = [
        # Other ranks make groups of their own, and none of them knows all.
        subgroup(group, members.tolist())
        for members in (grid[:, column], grid[row])
    ]
    return DeviceMesh.from_group(groups, device_type, mesh=grid, mesh_dim_names=("replicate", "shard"))


@dataclass(frozen=True)
class Plan:
    """Placements and types with which a model is sharded.

    Attributes:
        mesh: from :func:`mesh_of`.
        placements: the dimension each parameter is cut on; others stay whole and are left to the caller.
        reshard: drop gathered weights after forward; a number: keep them on so many ranks.
        reduce_dtype: of the sums of gradients, over ranks and microbatches.
        divide_by: what sums of gradients are divided by.
        elsewhere: parameters that are cut over other ranks than those of ``mesh``, with their mesh; they are
            gathered and reduced with their unit's others, in transfers of their own.
    """

    mesh: DeviceMesh
    placements: dict[nn.Parameter, int]
    reshard: bool | int
    reduce_dtype: torch.dtype
    divide_by: float
    elsewhere: Mapping[nn.Parameter, DeviceMesh] = field(default_factory=dict)

    def placement_function(self) -> Callable[[nn.Parameter], Any]:
        """Return what tells ``fully_shard`` how it cuts a parameter, and over which ranks.

        Raises:
            SettingsError: this torch cuts all parameters of a unit over the same ranks.
        """
        infos = {mesh: _mesh_info(mesh) for mesh in set(self.elsewhere.values())}

        def place(parameter: nn.Parameter) -> Any:
            shard = Shard(self.placements[parameter])
            mesh = self.elsewhere.get(parameter)
            return shard if mesh is None else _fsdp_common.ShardPlacementResult(shard, infos[mesh])

        return place


def _mesh_info(mesh: DeviceMesh) -> Any:
    """Return FSDP2's description of a mesh from :func:`mesh_of`, one object for all units."""
    if not hasattr(_fsdp_common, "ShardPlacementResult"):
        raise SettingsError(
            f"fsdp2: --fsdp2-shard-experts: torch {torch.__version__} cuts all weights of a layer over the "
            "same ranks, and experts have others; use torch 2.13, or drop --fsdp2-shard-experts"
        )
    if mesh.ndim == 1:
        return _fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return _fsdp_common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def dimension(shape: Sequence[int], pieces: int, dims: Iterable[int] | None = None) -> int | None:
    """Return the first dimension (of ``dims``) that has ``pieces`` equal pieces."""
    chosen = range(len(shape)) if dims is None else dims
    return next((dim for dim in chosen if shape[dim] and shape[dim] % pieces == 0), None)


class FirstGradients:
    """State that the first backward has left, to be looked at once.

    Args:
        root: a model that :func:`shard` has sharded.
        dtype: type of sums of gradients.
    """

    def __init__(self, root: nn.Module, dtype: torch.dtype) -> None:
        self._left: tuple[nn.Module, torch.dtype] | None = (root, dtype)

    def check(self) -> None:
        """Compare them with what was asked for, once there are any.

        Raises:
            SettingsError: from :func:`checks.require_reduced`.
        """
        if self._left is None:
            return
        root, dtype = self._left
        shards = [(name, each) for name, each in root.named_parameters() if isinstance(each, DTensor)]
        checks.require_reduced(_groups(root), shards, dtype)
        if any(each.grad is not None for _, each in shards):
            self._left = None


def shard(root: nn.Module, units: Collection[nn.Module], plan: Plan) -> FirstGradients:
    """Make ``FSDPModule`` of the units and of ``root``, which has the parameters that no unit has.

    Attributes of parameters survive. Classes and hooks of the modules stay for their lifetime.

    Args:
        root: the whole model.
        units: modules inside it, in any order.
        plan: placements and types.

    Returns:
        What to call after a backward.

    Raises:
        SettingsError: FSDP2's classes are not those that this was written for, or a shard does not take an
            attribute of its parameter.
    """
    attributes = {name: dict(vars(parameter)) for name, parameter in root.named_parameters()}
    ignored = {parameter for parameter in root.parameters() if parameter not in plan.placements}
    place = plan.placement_function()
    inner: list[Any] = [module for module in reversed(list(root.modules())) if module in units]
    for module in [*inner, root]:
        fully_shard(
            module,
            mesh=plan.mesh,
            reshard_after_forward=plan.reshard,
            shard_placement_fn=place,
            mp_policy=MixedPrecisionPolicy(reduce_dtype=plan.reduce_dtype),
            ignored_params=ignored,
        )
        # A factor in the reduction itself is what HCCL and gloo lack.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(plan.divide_by)
    for name, parameter in root.named_parameters():
        for key, value in attributes[name].items():
            try:
                setattr(parameter, key, value)
            except AttributeError as error:
                raise SettingsError(
                    f"fsdp2: parameter {name} has an attribute {key}, which a shard does not take ({error}); "
                    "give the attribute another name"
                ) from error
    _keep_sums_in(plan.reduce_dtype, _groups(root))
    root.register_forward_hook(_drop_without_backward)
    return FirstGradients(root, plan.reduce_dtype)


def _drop_without_backward(root: nn.Module, *_: Any) -> None:
    """Drop weights as backward would: parameters that are not shards are in no optimizer and no checkpoint.

    Nor may a gather that turned out to be for nobody be taken for one of the next weights.
    """
    if not torch.is_grad_enabled():
        for group in _groups(root):
            group.wait_for_unshard()
            group.reshard()


def _groups(root: Any) -> list[Any]:
    state = root._get_fsdp_state()
    state._lazy_init()
    return [group for unit in state._state_ctx.all_states for group in unit._fsdp_param_groups]


def _keep_sums_in(dtype: torch.dtype, groups: Iterable[Any]) -> None:
    """Keep sums of gradients in ``dtype``; FSDP2 would round every microbatch's to the parameter's type."""
    for group in groups:
        checks.require_names(group, ("_orig_dtype",))
        if group._orig_dtype is not None and group._orig_dtype != dtype:
            group._orig_dtype = dtype
            for each in group.fsdp_params:
                checks.require_names(each.sharded_param, ("grad_dtype",))
                checks.require_names(each, ("to_sharded_dtensor",))
                each.sharded_param.grad_dtype = dtype
                # It would describe a gradient as being of the parameter's type.
                each.to_sharded_dtensor = partial(_shard_like, each)


def _shard_like(each: Any, tensor: Tensor) -> Any:
    return like(tensor, each.sharded_param)


def sharded_gradients(root: nn.Module) -> list[Tensor]:
    """Return this rank's pieces of all gradients that are there."""
    return [
        local_of(parameter.grad)
        for parameter in root.parameters()
        if isinstance(parameter, DTensor) and parameter.grad is not None
    ]


# -- gathers ahead of the computation that hides them -----------------------------------------------

_graph_task_id = versions.private("torch._C:_current_graph_task_id", "FSDP2's prefetch")


class _InForward(list[Any]):
    """Units that follow in forward; none for a layer that runs again, where they have been used."""

    def __iter__(self) -> Iterator[Any]:
        again = _graph_task_id() != -1 or runs_apart()
        return iter(()) if again else super().__iter__()


def prefetch(units: Sequence[Any], ahead: int, root: Any = None, asynchronous: bool = False) -> None:
    """Have each unit start the gathers of its neighbours: the next in forward, those before in backward.

    At most ``ahead`` units are gathered beside the one that computes.

    Args:
        units: ``FSDPModule``, in the order in which a forward pass runs them.
        ahead: units; 0: every unit gathers its own weights when it runs.
        root: the ``FSDPModule`` around them, which runs first in either direction.
        asynchronous: issue gathers as works to wait for; without streams, only these overlap.
    """
    units = list(units)
    for number, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[number + 1 : number + 1 + ahead])
        state = unit._get_fsdp_state()
        state._states_to_forward_prefetch = _InForward(state._states_to_forward_prefetch)
        _set_backward_prefetch(unit, units[max(number - ahead, 0) : number][::-1])
    if root is not None:
        root.set_modules_to_forward_prefetch(units[:ahead])
        _set_backward_prefetch(root, units[-ahead:][::-1] if ahead else [])
        units.append(root)
    if asynchronous:
        for unit in units:
            unit._set_unshard_async_op(True)


def _set_backward_prefetch(unit: Any, others: Sequence[Any]) -> None:
    """Set those alone: with none given FSDP2 gathers what ran before, in a pipeline another microbatch's.

    A unit whose backward runs has its weights, so that its own gather is none.
    """
    unit.set_modules_to_backward_prefetch(list(others) or [unit])
