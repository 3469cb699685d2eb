"""Megatron's wrapper for FSDP2, its helpers for sharded tensors, and its check of arguments.

Dense weights are sharded, and experts' where asked for; everything else is left to Megatron's own DDP.
Helpers make no copies, and know meshes with replicas.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.features.data_parallel.fsdp2 import pairs, shards
from mindspeed_dsa.features.data_parallel.fsdp2.feature import Options, check_sharding_size
from mindspeed_dsa.features.data_parallel.fsdp2.placements import Placements, class_of, place
from mindspeed_dsa.megatron.gathered_weights import hold, note_calls, on_late_gradients
from mindspeed_dsa.parallel.local_shards import local_of, shard_axis
from mindspeed_dsa.patches.errors import SettingsError

_Function = Callable[..., Any]
_WHOLE = "_mindspeed_dsa_whole"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class _Whole:
    """Reduction of gradients of parameters that are not sharded; no module, which would own them.

    Attributes:
        ddp: Megatron's; None where there are no such parameters.
        sharded: what looks at the first gradients of the others; None where there are no others.
    """

    ddp: Any = None
    sharded: shards.FirstGradients | None = None


def build(original: _Function, context: Context[Options]) -> _Function:
    """Decorate ``TorchFullyShardedDataParallel.__init__``; the original is not called."""

    def __init__(
        self: Any,
        config: Any,
        ddp_config: Any,
        module: nn.Module,
        sub_modules_to_wrap: Any = None,
        disable_bucketing: bool = False,
        process_group: Any = None,
    ) -> None:
        megatron, options = context.megatron, context.options
        base = megatron("core.distributed.data_parallel_base")._BaseDataParallel
        base.__init__(self, config, module)
        self.ddp_config = ddp_config
        self.process_group = process_group or megatron("core.parallel_state").get_data_parallel_group(
            with_context_parallel=True
        )
        self.device_mesh = _mesh(self.process_group, options)
        device = torch.device(platforms.current().device)
        for parameter in module.parameters():
            parameter.data = parameter.data.to(device)
        placements = place(module, config, self.device_mesh, context)
        whole = {name: each for name, each in module.named_parameters() if each not in placements.dims}
        for parameter in whole.values():
            if not placements.counts(parameter, self.device_mesh):
                parameter.shared = True  # type: ignore[attr-defined]
        sharded = _shard(self, placements, sub_modules_to_wrap or _usual_units(megatron), context)
        setattr(self, _WHOLE, _Whole(_ddp_of(whole, self, megatron, options), sharded))

    return __init__


def _mesh(group: Any, options: Options) -> Any:
    ranks, platform = group.size(), platforms.current()
    size = options.sharding_size or ranks
    if options.sharding_size is not None and (found := list(check_sharding_size(size, ranks))):
        raise SettingsError(f"fsdp2: {found[0]}")
    devices = getattr(group, "_device_types", None)  # where torch says it elsewhere, it refuses for itself
    if devices is not None and platform.device_type not in {device.type for device in devices}:
        raise SettingsError(
            f"fsdp2: data parallel ranks talk over {dist.get_backend(group)}, which does not move tensors of "
            f"{platform.device_type}; use --distributed-backend {platform.backend}"
        )
    return shards.mesh_of(group, platform.device_type, size)


def _shard(
    self: Any, placements: Placements, classes: Iterable[type], context: Context[Options]
) -> shards.FirstGradients | None:
    if not placements.dims:
        return None
    config, options, platform = self.config, context.options, platforms.current()
    units = list(_units(self.module, config, classes, context))
    units = [unit for unit in units if any(each in placements.dims for each in unit.parameters())]
    reshard = options.reshard
    if reshard is None:
        reshard = getattr(self.ddp_config, "reshard_after_forward", True)
    pieces = self.device_mesh.size(-1)
    if not isinstance(reshard, bool) and pieces % reshard:
        raise SettingsError(
            f"fsdp2: --fsdp2-config-path: reshard_after_forward {reshard} must divide the {pieces} ranks "
            "that share the weights"
        )
    plan = shards.Plan(
        mesh=self.device_mesh,
        placements=placements.dims,
        reshard=reshard,
        reduce_dtype=_reduce_dtype(config, options),
        divide_by=1.0 if config.calculate_per_token_loss else float(self.process_group.size()),
        elsewhere=placements.experts,
    )
    first_gradients = shards.shard(self.module, units, plan)
    for unit in units:
        unit.register_forward_pre_hook(pairs.mark_gathered)
        note_calls(unit)
        hold(unit, partial(pairs.gathered, ref(unit)))
    embeddings = context.megatron("core.models.common.embeddings.language_model_embedding")
    for unit in units:
        if isinstance(unit, embeddings.LanguageModelEmbedding):
            unit.set_unshard_in_backward(False)  # its backward reads no weight
        else:
            pairs.leave_gradients(unit)
    on_late_gradients(self, partial(pairs.reduce_left, ref(self.module)))
    shards.prefetch(units, options.prefetch, self.module, asynchronous=not platform.asynchronous)
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        pairs.follow(self.module, units, context.megatron)
    return first_gradients


def _reduce_dtype(config: Any, options: Options) -> torch.dtype:
    """Return the type of sums, never narrower than what is summed."""
    dtype: torch.dtype = config.params_dtype
    return dtype if dtype.itemsize > 2 else _DTYPES[options.reduce_dtype]


def _units(
    module: nn.Module, config: Any, classes: Iterable[type], context: Context[Options]
) -> Iterator[nn.Module]:
    """Yield what gathers its weights for itself, in the order of a forward pass."""
    megatron = context.megatron
    column = megatron("core.tensor_parallel.layers").ColumnParallelLinear
    # Parts of layers in Megatron's own modules, and the output layer, which is found by its name.
    chosen = {each for each in classes if each is not column}
    chosen.update(class_of(name) for name in context.options.wrapped)
    for each in module.modules():
        chosen.update(getattr(each, "_fsdp_modules", ()))
    # Where the loss is computed together with the logits, the weight is read outside of its layer.
    heads_apart = getattr(config, "cross_entropy_fusion_impl", None) != "linear"
    heads = {getattr(each, "output_layer", None) for each in module.modules()} if heads_apart else set()
    for each in module.modules():
        if isinstance(each, tuple(chosen)) or each in heads:
            yield each


def _usual_units(megatron: Megatron) -> tuple[type, ...]:
    layer = megatron("core.transformer.transformer_layer").TransformerLayer
    embeddings = megatron("core.models.common.embeddings.language_model_embedding")
    return layer, embeddings.LanguageModelEmbedding


def _ddp_of(whole: dict[str, nn.Parameter], self: Any, megatron: Megatron, options: Options) -> Any:
    """Wrap parameters that are not sharded in Megatron's DDP; None where there are none."""
    if not any(parameter.requires_grad for parameter in whole.values()):
        return None
    holder = nn.Module()
    for name, parameter in whole.items():
        holder.register_parameter(name.replace(".", "/"), parameter)
    distributed = megatron("core.distributed")
    config = distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=_reduce_dtype(self.config, options) is torch.float32,
        check_for_nan_in_grad=self.ddp_config.check_for_nan_in_grad,
    )
    return distributed.DistributedDataParallel(self.config, config, holder)


def reduce_whole_gradients(original: _Function) -> _Function:
    """Decorate ``finish_grad_sync``; what is sharded has been reduced during backward."""

    def finish_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        whole = getattr(self, _WHOLE)
        if whole.sharded is not None:
            whole.sharded.check()
        if whole.ddp is not None:
            whole.ddp.finish_grad_sync(*args, **kwargs)

    return finish_grad_sync


def scale_all_gradients(original: _Function) -> _Function:
    """Decorate ``scale_gradients``."""

    def scale_gradients(self: Any, scaling_factor: Any) -> None:
        for gradient in shards.sharded_gradients(self.module):
            gradient.mul_(scaling_factor)
        if (ddp := getattr(self, _WHOLE).ddp) is not None:
            ddp.scale_gradients(scaling_factor)

    return scale_gradients


def zero_whole_gradients(original: _Function) -> _Function:
    """Decorate ``zero_grad_buffer``; gradients of shards are dropped by the optimizer."""

    def zero_grad_buffer(self: Any) -> None:
        if (ddp := getattr(self, _WHOLE).ddp) is not None:
            ddp.zero_grad_buffer()

    return zero_grad_buffer


# -- Megatron's helpers for sharded tensors ---------------------------------------------------------


def to_local_if_dtensor(tensor: Any) -> Any:
    """Return this rank's piece, one object; in place of this function and of ``_unshard_if_dtensor``."""
    return local_of(tensor)


def shard_group_if_dtensor(tensor: Any, data_parallel_group: Any = None) -> Any:
    """Return the ranks that have the other pieces, in place of ``get_data_parallel_group_if_dtensor``.

    Args:
        tensor: a parameter or gradient.
        data_parallel_group: of the tensors before, which have the same; None if there is none.
    """
    if not isinstance(tensor, DTensor):
        return data_parallel_group
    return tensor.device_mesh.get_group(shard_axis(tensor))


def gradient_in_place(tensor_to_shard: Tensor, reference_tensor: Any) -> Any:
    """Return the gradient itself, in place of ``_reshard_if_dtensor``.

    Args:
        tensor_to_shard: what :func:`to_local_if_dtensor` made of the gradient, reduced since.
        reference_tensor: the gradient.
    """
    return reference_tensor


def describe_whole_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``_collect_main_grad_data_for_unscaling``: one operator works on all of them.

    Pieces come first: by the first one torch decides whether ranks tell each other of infinities.
    """

    def collect(self: Any) -> Any:
        gradients = original(self) or []
        pieces = [each for each in gradients if isinstance(each, DTensor)]
        if len(pieces) in (0, len(gradients)):
            return gradients
        mesh = pieces[0].device_mesh
        everywhere = [Replicate()] * mesh.ndim
        return pieces + [
            DTensor.from_local(each, mesh, everywhere, run_check=False)
            for each in gradients
            if not isinstance(each, DTensor)
        ]

    return collect


# -- arguments --------------------------------------------------------------------------------------

_CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def validate_beside_experts_and_pipelines(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``validate_args``; with pipelines or experts it is not told of FSDP2.

    The feature's own checks refuse what Megatron would refuse beside them, and this wrapper sets what
    Megatron would derive from the flag.
    """

    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        alone = args.pipeline_model_parallel_size == 1 and args.expert_model_parallel_size == 1
        if alone or not getattr(args, "use_torch_fsdp2", False):
            return original(args, *rest, **kwargs)
        args.use_torch_fsdp2 = False
        try:
            # Tensor parallelism alone would ask for it.
            with mock.patch.dict(os.environ, _CONNECTIONS):
                result = original(args, *rest, **kwargs)
        finally:
            args.use_torch_fsdp2 = True
        streams = getattr(args, "high_priority_stream_groups", None)
        if streams is not None:
            streams += [group for group in ("dp_cp", "ep_dp") if group not in streams]
        return result

    return validate_args
