"""Which parameters of a model are cut, on which dimension, and over which ranks.

Dense weights are cut over all data and context parallel ranks, or over those that share a copy. Experts are
cut, where that is wanted, over the ranks that have the same ones: Megatron's expert data parallel group.
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
    """Placements of a model's parameters.

    Attributes:
        dims: the dimension that each is cut on; those left out stay whole.
        experts: the mesh of those that are cut over the ranks with the same experts.
    """

    dims: dict[nn.Parameter, int] = field(default_factory=dict)
    experts: dict[nn.Parameter, DeviceMesh] = field(default_factory=dict)

    def counts(self, parameter: nn.Parameter, dense: DeviceMesh) -> bool:
        """Return whether a whole parameter counts in norms on this rank, which are summed over shards.

        Norms of dense weights and of experts are sums of their own, unless all ranks have all experts.

        Args:
            parameter: one that is not cut.
            dense: the mesh of dense weights.
        """
        if getattr(parameter, "allreduce", True):
            cut = [each for each in self.dims if each not in self.experts]
            mesh: DeviceMesh | None = dense
        else:
            cut, mesh = list(self.experts), next(iter(self.experts.values()), None)
        if mesh is None or not any(each.requires_grad for each in cut):
            return True
        return mesh.get_local_rank(mesh.ndim - 1) == 0


def place(module: nn.Module, config: Any, dense: DeviceMesh, context: Context[Options]) -> Placements:
    """Place the parameters of a model.

    Parameters stay whole that have no dimension to be cut into equal pieces, as checkpoints need, and those
    of another type than the rest of their layer.

    Args:
        module: the model.
        config: its configuration.
        dense: the mesh of dense weights.
        context: the feature's.

    Raises:
        SettingsError: experts are to be cut and checkpoints of their module have places of their own.
    """
    megatron, options = context.megatron, context.options
    moe, mlp = megatron("core.transformer.moe.moe_layer").MoELayer, megatron("core.transformer.mlp").MLP
    sequential = megatron("core.transformer.moe.experts").SequentialMLP
    whole_classes = tuple(class_of(name) for name in options.ignored)
    whole: set[nn.Parameter] = set()
    gated: set[nn.Parameter] = set()
    experts: set[nn.Parameter] = set()
    for each in module.modules():
        if isinstance(each, moe):
            experts.update(each.experts.parameters())
            if options.experts and not isinstance(each.experts, sequential):
                raise SettingsError(
                    f"fsdp2: {EXPERTS}: {type(each.experts).__name__} places experts in checkpoints by their "
                    f"ranks alone; use --transformer-impl local, or drop {EXPERTS}"
                )
        elif isinstance(each, mlp) and each.config.gated_linear_unit:
            gated.update(each.linear_fc1.parameters())
        if isinstance(each, whole_classes):
            whole.update(each.parameters())
    found = Placements()
    mesh = _expert_mesh(dense, context) if options.experts and experts else None
    for parameter in module.parameters():
        apart = not getattr(parameter, "allreduce", True)  # reduced over expert data parallel ranks
        over = mesh if apart else dense
        is_expert = apart or parameter in experts
        if (
            over is None
            or over.size(-1) == 1  # FSDP2 would copy every parameter whenever it is used
            or parameter in whole
            or parameter.dtype != config.params_dtype
            or (is_expert and not options.experts)
        ):
            continue
        dim = _dimension(parameter, over.size(-1), parameter in gated)
        if dim is not None:
            found.dims[parameter] = dim
            if apart:
                found.experts[parameter] = over
    if experts and options.experts and not any(parameter in found.dims for parameter in experts):
        context.log.warning(
            "%s: experts stay whole: %s",
            EXPERTS,
            "no two ranks, or no two within --fsdp2-sharding-size, have the same ones; use fewer expert "
            "parallel ranks, or more of the others"
            if mesh is None
            else "their sizes have no equal pieces",
            once=True,
        )
    return found


def _dimension(parameter: nn.Parameter, pieces: int, gated: bool) -> int | None:
    dims = dimensions_to_cut(parameter)
    if dims is None and gated and pieces % 2:
        # A piece of rows has to lie within one half of a gated projection.
        dims = tuple(range(1, parameter.dim()))
    return shards.dimension(parameter.shape, pieces, dims)


def _expert_mesh(dense: DeviceMesh, context: Context[Options]) -> DeviceMesh | None:
    """Make the mesh of ranks that have the same experts; None where a copy is one rank's.

    Where fewer ranks than all share a copy of the dense weights, they are neighbours with fast links, and so
    are the ranks among them that have the same experts: these share a copy.
    """
    group = context.megatron("core.parallel_state").get_expert_data_parallel_group()
    size = group.size()
    if dense.ndim > 1:
        # Of n neighbours, every (all ranks / expert replicas)-th has the same experts.
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
    """Import a class that the file of options names.

    Raises:
        SettingsError: there is none.
    """
    package, _, attribute = name.rpartition(".")
    try:
        found: type = getattr(import_module(package), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(
            f"fsdp2: --fsdp2-config-path names {name}, which cannot be imported: {error}"
        ) from error
    if not isinstance(found, type):
        raise SettingsError(f"fsdp2: --fsdp2-config-path names {name}, which is not a class")
    return found
