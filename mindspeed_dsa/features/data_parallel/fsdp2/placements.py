"""Selection of the parameters to shard, and of the dimension and ranks for each parameter.

Dense weights are sharded over all data and context parallel ranks, or over ``--fsdp2-sharding-size`` of them.
Experts, on request, are sharded over the ranks that hold the same experts: Megatron's expert data parallel
group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.data_parallel.fsdp2 import shards
from mindspeed_dsa.features.data_parallel.fsdp2.feature import EXPERTS, Options
from mindspeed_dsa.parallel.local_shards import dimensions_to_cut
from mindspeed_dsa.patches.errors import SettingsError


@dataclass
class Placements:
    """Sharding of a model's parameters.

    Attributes:
        dims: dict from parameter to the dimension to shard; other parameters stay whole.
        experts: dict from expert parameter to the mesh of ranks with the same experts.
    """

    dims: dict[nn.Parameter, int] = field(default_factory=dict)
    experts: dict[nn.Parameter, DeviceMesh] = field(default_factory=dict)

    def counts(self, parameter: nn.Parameter, dense: DeviceMesh) -> bool:
        """Return whether this rank adds the gradient of an unsharded parameter to the gradient norm.

        If the norm is summed over shard ranks, exactly one of them adds it.

        Args:
            parameter: parameter that is not sharded.
            dense: mesh of the dense weights.
        """
        # Every shard rank has the whole parameter, so the first one counts it. Dense weights and experts have
        # separate norms, unless all ranks have all experts.
        if getattr(parameter, "allreduce", True):
            cut = [param for param in self.dims if param not in self.experts]
            mesh: DeviceMesh | None = dense
        else:
            cut, mesh = list(self.experts), next(iter(self.experts.values()), None)
        if mesh is None or not any(param.requires_grad for param in cut):
            return True
        return mesh.get_local_rank(mesh.ndim - 1) == 0


def place(module: nn.Module, config: Any, dense: DeviceMesh, context: Context[Options]) -> Placements:
    """Decide the sharding of a model's parameters.

    Checkpoints need equal shards, so parameters without a divisible dimension are not sharded. Neither are
    parameters with another dtype than ``params_dtype``.

    Args:
        module: model to shard.
        config: configuration of the model.
        dense: mesh of the dense weights.
        context: context of the feature.

    Raises:
        SettingsError: experts are to be sharded, but the checkpoints of their module do not support it.
    """
    megatron, options = context.megatron, context.options
    moe, mlp = megatron("core.transformer.moe.moe_layer").MoELayer, megatron("core.transformer.mlp").MLP
    sequential = megatron("core.transformer.moe.experts").SequentialMLP
    whole_classes = tuple(class_of(name) for name in options.ignored)
    whole: set[nn.Parameter] = set()
    gated: set[nn.Parameter] = set()
    experts: set[nn.Parameter] = set()
    for part in module.modules():
        if isinstance(part, moe):
            experts.update(part.experts.parameters())
            if options.experts and not isinstance(part.experts, sequential):
                raise SettingsError(
                    f"fsdp2: {EXPERTS}: {type(part.experts).__name__} places experts in checkpoints by their "
                    f"ranks alone; use --transformer-impl local, or drop {EXPERTS}"
                )
        elif isinstance(part, mlp) and part.config.gated_linear_unit:
            gated.update(part.linear_fc1.parameters())
        if isinstance(part, whole_classes):
            whole.update(part.parameters())
    placements = Placements()
    mesh = _expert_mesh(dense, context) if options.experts and experts else None
    for parameter in module.parameters():
        apart = not getattr(parameter, "allreduce", True)  # reduced over expert data parallel ranks
        over = mesh if apart else dense
        is_expert = apart or parameter in experts
        if (
            over is None
            or over.size(-1) == 1  # a single shard: FSDP2 would still copy the parameter on each use
            or parameter in whole
            or parameter.dtype != config.params_dtype
            or (is_expert and not options.experts)
        ):
            continue
        dim = _dimension(parameter, over.size(-1), parameter in gated)
        if dim is not None:
            placements.dims[parameter] = dim
            if apart:
                placements.experts[parameter] = over
    if experts and options.experts and not any(parameter in placements.dims for parameter in experts):
        context.log.warning(
            "%s: experts stay whole: %s",
            EXPERTS,
            "no two ranks, or no two within --fsdp2-sharding-size, have the same ones; use fewer expert "
            "parallel ranks, or more of the others"
            if mesh is None
            else "their sizes have no equal pieces",
            once=True,
        )
    return placements


def _dimension(parameter: nn.Parameter, pieces: int, gated: bool) -> int | None:
    dims = dimensions_to_cut(parameter)
    if dims is None and gated and pieces % 2:
        # A piece of rows must be inside one half, gate or up, of a gated projection.
        dims = tuple(range(1, parameter.dim()))
    return shards.dimension(parameter.shape, pieces, dims)


def _expert_mesh(dense: DeviceMesh, context: Context[Options]) -> DeviceMesh | None:
    """Return the mesh over which experts are sharded; ``None`` if it would have only one rank.

    By default it has all ranks with the same experts. With ``--fsdp2-sharding-size``, groups of neighbouring
    ranks with fast links share one copy of the dense weights. The mesh then has only the ranks of this rank's
    group that have the same experts.
    """
    group = context.megatron("core.parallel_state").get_expert_data_parallel_group()
    size = group.size()
    if dense.ndim > 1:
        # Example: 8 ranks, 4 with the same experts, sharding size 4: 4 * 4 // 8 = 2 ranks share experts.
        size = size * dense.size(-1) // dense.size()
    if size <= 1:
        return None
    if group.size() % size:
        raise SettingsError(
            f"fsdp2: {EXPERTS}: with --fsdp2-sharding-size {dense.size(-1)} {size} ranks would share a copy "
            f"of experts, of {group.size()} with the same ones; choose a size that divides them, or omit it"
        )
    return shards.mesh_of(group, platforms.current().device_type, size)


def class_of(name: str) -> type:
    """Import a class named in the file of ``--fsdp2-config-path``.

    Raises:
        SettingsError: the class does not exist.
    """
    package, _, attribute = name.rpartition(".")
    try:
        imported: type = getattr(import_module(package), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(
            f"fsdp2: --fsdp2-config-path names {name}, which cannot be imported: {error}"
        ) from error
    if not isinstance(imported, type):
        raise SettingsError(f"fsdp2: --fsdp2-config-path names {name}, which is not a class")
    return imported
