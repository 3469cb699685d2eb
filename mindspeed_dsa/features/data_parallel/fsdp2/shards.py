"""FSDP2 with equal shards on any divisible dimension, and with prefetched gathers.

Gradient sums have a separate dtype. This module does not depend on Megatron.
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
    """Return the mesh ``[replicas, shards]``, or ``[shards]`` if there is one replica.

    Consecutive ranks of the group share a replica, because neighbours have the fastest links.

    Args:
        group: process group of all data parallel ranks.
        device_type: device type of the parameters.
        sharding_size: number of ranks that share one copy; must divide the group's size.
    """
    ranks = dist.get_process_group_ranks(group)
    if sharding_size == len(ranks):
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=("shard",))
    grid = torch.tensor(ranks).view(-1, sharding_size)
    row, column = divmod(ranks.index(dist.get_rank()), sharding_size)
    groups = [
        # Each rank creates only the two groups that it belongs to.
        subgroup(group, members.tolist())
        for members in (grid[:, column], grid[row])
    ]
    return DeviceMesh.from_group(groups, device_type, mesh=grid, mesh_dim_names=("replicate", "shard"))


@dataclass(frozen=True)
class Plan:
    """Sharding and dtypes of a model.

    Attributes:
        mesh: mesh from :func:`mesh_of`.
        placements: dict from parameter to the dimension to shard. Other parameters stay whole and are left to
            the caller.
        reshard: whether to free gathered weights after forward, or number of ranks to reshard them to.
        reduce_dtype: dtype of gradient sums over ranks and microbatches.
        divide_by: divisor of gradient sums over ranks.
        elsewhere: dict from parameter to its mesh, for parameters that are sharded over another mesh than
            :attr:`mesh`. They are gathered and reduced together with the rest of their unit, but in separate
            collectives.
    """

    mesh: DeviceMesh
    placements: dict[nn.Parameter, int]
    reshard: bool | int
    reduce_dtype: torch.dtype
    divide_by: float
    elsewhere: Mapping[nn.Parameter, DeviceMesh] = field(default_factory=dict)

    def placement_function(self) -> Callable[[nn.Parameter], Any]:
        """Return the ``shard_placement_fn`` for ``fully_shard``.

        Raises:
            SettingsError: this torch cannot shard parameters of one unit over different ranks.
        """
        infos = {mesh: _mesh_info(mesh) for mesh in set(self.elsewhere.values())}

        def place(parameter: nn.Parameter) -> Any:
            shard = Shard(self.placements[parameter])
            mesh = self.elsewhere.get(parameter)
            return shard if mesh is None else _fsdp_common.ShardPlacementResult(shard, infos[mesh])

        return place


def _mesh_info(mesh: DeviceMesh) -> Any:
    """Return FSDP2's description of a mesh from :func:`mesh_of`."""
    # Called once per mesh: all units share one object.
    if not hasattr(_fsdp_common, "ShardPlacementResult"):
        raise SettingsError(
            f"fsdp2: --fsdp2-shard-experts: torch {torch.__version__} cuts all weights of a layer over the "
            "same ranks, and experts have others; use torch 2.13, or drop --fsdp2-shard-experts"
        )
    if mesh.ndim == 1:
        return _fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return _fsdp_common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def dimension(shape: Sequence[int], pieces: int, dims: Iterable[int] | None = None) -> int | None:
    """Return the first dimension in ``dims`` (default: all) that is divisible by ``pieces``, or ``None``."""
    candidates = range(len(shape)) if dims is None else dims
    return next((dim for dim in candidates if shape[dim] and shape[dim] % pieces == 0), None)


class FirstGradients:
    """One-time check of the gradients after the first backward.

    Args:
        root: model that was sharded with :func:`shard`.
        dtype: expected dtype of gradient sums.
    """

    def __init__(self, root: nn.Module, dtype: torch.dtype) -> None:
        self._left: tuple[nn.Module, torch.dtype] | None = (root, dtype)

    def check(self) -> None:
        """Check the gradients the first time that any exist.

        Raises:
            SettingsError: see :func:`checks.require_reduced`.
        """
        if self._left is None:
            return
        root, dtype = self._left
        shards = [(name, param) for name, param in root.named_parameters() if isinstance(param, DTensor)]
        checks.require_reduced(_groups(root), shards, dtype)
        if any(param.grad is not None for _, param in shards):
            self._left = None


def shard(root: nn.Module, units: Collection[nn.Module], plan: Plan) -> FirstGradients:
    """Convert the units and ``root`` to ``FSDPModule``; ``root`` gets the parameters outside of units.

    Attributes of parameters are kept. Classes and hooks of the modules change permanently.

    Args:
        root: whole model.
        units: modules inside ``root``, in any order.
        plan: sharding and dtypes.

    Returns:
        Object whose ``check`` method the caller calls after each backward.

    Raises:
        SettingsError: FSDP2's classes are not the supported ones, or a shard does not accept an attribute of
            its parameter.
    """
    attributes = {name: dict(vars(parameter)) for name, parameter in root.named_parameters()}
    # `fully_shard` replaces parameters by shards without their attributes.
    ignored = {parameter for parameter in root.parameters() if parameter not in plan.placements}
    place = plan.placement_function()
    # Inner modules first: an outer one takes the parameters that are left.
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
        # HCCL and gloo have no reduction with a factor, so the sum is divided separately.
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
    """Forward hook that frees the weights if no backward will follow."""
    # Optimizer and checkpoints know the shards only. Also, FSDP2 would take a prefetched gather that no unit
    # has used for a gather of the next weights.
    if not torch.is_grad_enabled():
        for group in _groups(root):
            group.wait_for_unshard()
            group.reshard()


def _groups(root: Any) -> list[Any]:
    state = root._get_fsdp_state()
    state._lazy_init()
    return [group for unit in state._state_ctx.all_states for group in unit._fsdp_param_groups]


def _keep_sums_in(dtype: torch.dtype, groups: Iterable[Any]) -> None:
    """Keep gradient sums in ``dtype``; FSDP2 would round them to the parameter's dtype every microbatch."""
    for group in groups:
        checks.require_names(group, ("_orig_dtype",))
        if group._orig_dtype is not None and group._orig_dtype != dtype:
            group._orig_dtype = dtype
            for param in group.fsdp_params:
                checks.require_names(param.sharded_param, ("grad_dtype",))
                checks.require_names(param, ("to_sharded_dtensor",))
                param.sharded_param.grad_dtype = dtype
                # FSDP2's method would give the gradient the parameter's dtype.
                param.to_sharded_dtensor = partial(_shard_like, param)


def _shard_like(each: Any, tensor: Tensor) -> Any:
    return like(tensor, each.sharded_param)


def sharded_gradients(root: nn.Module) -> list[Tensor]:
    """Return this rank's shards of all existing gradients."""
    return [
        local_of(parameter.grad)
        for parameter in root.parameters()
        if isinstance(parameter, DTensor) and parameter.grad is not None
    ]


# -- prefetched gathers ------------------------------------------------------------------------------

_graph_task_id = versions.private("torch._C:_current_graph_task_id", "FSDP2's prefetch")


class _InForward(list[Any]):
    """Units to prefetch in forward; iterates as empty while backward recomputes the forward."""

    def __iter__(self) -> Iterator[Any]:
        # A graph task id other than -1: this forward is a recomputation inside a backward.
        again = _graph_task_id() != -1 or runs_apart()
        return iter(()) if again else super().__iter__()


def prefetch(units: Sequence[Any], ahead: int, root: Any = None, asynchronous: bool = False) -> None:
    """Set the units that each unit prefetches: the next units in forward, the previous ones in backward.

    At most ``ahead`` units are gathered in addition to the running one.

    Args:
        units: ``FSDPModule`` objects in the order of a forward pass.
        ahead: number of units to prefetch; with 0 every unit gathers its own weights when it runs.
        root: ``FSDPModule`` around the units, which runs first in both directions.
        asynchronous: whether all-gathers use ``async_op=True``, the only way to overlap them with computation
            on platforms without streams.
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
    """Set ``others`` as the units that ``unit`` prefetches in backward; if empty, set ``unit`` itself."""
    # With an empty list FSDP2 would prefetch by the last order of execution, which in a pipeline belongs to
    # another microbatch. A unit in backward has its weights already, so prefetching itself does nothing.
    unit.set_modules_to_backward_prefetch(list(others) or [unit])
