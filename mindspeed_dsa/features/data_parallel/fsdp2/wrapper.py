"""Replacements for Megatron's FSDP2 wrapper, its helpers for sharded tensors, and its argument check.

The wrapper shards dense weights, and experts on request. Megatron's own DDP handles all other parameters. The
helpers make no copies and support meshes with replicas.
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
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.megatron.gathered_weights import hold, note_calls, on_late_gradients
from mindspeed_dsa.parallel.local_shards import local_of, shard_axis
from mindspeed_dsa.patches.errors import SettingsError

_Function = Callable[..., Any]
_WHOLE = "_mindspeed_dsa_whole"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class _Whole:
    """Handlers for the gradients of unsharded ("whole") and sharded parameters.

    Attributes:
        ddp: Megatron's DDP of the unsharded parameters; ``None`` if there are none.
        sharded: check of the sharded parameters' first gradients; ``None`` if there are none.
        is_checked: whether NaN and infinite gradients of sharded parameters stop the job.
    """

    # Stored in a plain object: an nn.Module attribute would register DDP's parameters a second time.
    ddp: Any = None
    sharded: shards.FirstGradients | None = None
    is_checked: bool = False


class CheckedGradients:
    """Argument ``check_for_nan_in_loss_and_grad``, which Megatron-LM does not pass to FSDP2's wrapper."""

    def __init__(self, context: Context[Options]) -> None:
        self.wanted = False


def build(original: _Function, context: Context[Options]) -> _Function:
    """Decorate ``TorchFullyShardedDataParallel.__init__``, replacing the original."""

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
        # FSDP2 shards parameters on the mesh's device.
        for parameter in module.parameters():
            parameter.data = parameter.data.to(device)
        placements = place(module, config, self.device_mesh, context)
        whole = {name: param for name, param in module.named_parameters() if param not in placements.dims}
        # Megatron leaves parameters with `shared` out of norms.
        for parameter in whole.values():
            if not placements.counts(parameter, self.device_mesh):
                parameter.shared = True  # type: ignore[attr-defined]
        sharded = _shard(self, placements, sub_modules_to_wrap or _usual_units(megatron), context)
        is_checked = ddp_config.check_for_nan_in_grad or context.state(CheckedGradients).wanted
        ddp = _ddp_of(whole, self, megatron, options, is_checked)
        setattr(self, _WHOLE, _Whole(ddp, sharded, is_checked))

    return __init__


def _mesh(group: Any, options: Options) -> Any:
    ranks, platform = group.size(), platforms.current()
    size = options.sharding_size or ranks
    if options.sharding_size is not None and (found := list(check_sharding_size(size, ranks))):
        raise SettingsError(f"fsdp2: {found[0]}")
    # Groups without `_device_types` are checked by torch itself.
    devices = getattr(group, "_device_types", None)
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
    # A unit without sharded parameters has nothing to gather.
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
        # A per-token loss is divided by the tokens of all ranks later.
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
            unit.set_unshard_in_backward(False)  # an embedding's backward does not read its weight
        else:
            pairs.leave_gradients(unit)
    on_late_gradients(self, partial(pairs.reduce_left, ref(self.module)))
    shards.prefetch(units, options.prefetch, self.module, asynchronous=not platform.asynchronous)
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        pairs.follow(self.module, units, context.megatron)
    return first_gradients


def _reduce_dtype(config: Any, options: Options) -> torch.dtype:
    """Return the dtype of gradient sums, which is at least as wide as the gradients."""
    dtype: torch.dtype = config.params_dtype
    return dtype if dtype.itemsize > 2 else _DTYPES[options.reduce_dtype]


def _units(
    module: nn.Module, config: Any, classes: Iterable[type], context: Context[Options]
) -> Iterator[nn.Module]:
    """Yield the modules that gather their own weights, in the order of a forward pass."""
    megatron = context.megatron
    column = megatron("core.tensor_parallel.layers").ColumnParallelLinear
    # Megatron's list includes ColumnParallelLinear for the output layer, but layers have such parts too. The
    # output layer is found by its attribute name instead.
    unit_classes = {kind for kind in classes if kind is not column}
    unit_classes.update(class_of(name) for name in context.options.wrapped)
    for child in module.modules():
        unit_classes.update(getattr(child, "_fsdp_modules", ()))
    # A loss that is fused with the logits reads the output weight outside of its layer.
    heads_apart = getattr(config, "cross_entropy_fusion_impl", None) != "linear"
    heads = {getattr(child, "output_layer", None) for child in module.modules()} if heads_apart else set()
    for child in module.modules():
        if isinstance(child, tuple(unit_classes)) or child in heads:
            yield child


def _usual_units(megatron: Megatron) -> tuple[type, ...]:
    layer = megatron("core.transformer.transformer_layer").TransformerLayer
    embeddings = megatron("core.models.common.embeddings.language_model_embedding")
    return layer, embeddings.LanguageModelEmbedding


def _ddp_of(
    whole: dict[str, nn.Parameter], self: Any, megatron: Megatron, options: Options, is_checked: bool
) -> Any:
    """Wrap the parameters that are not sharded in Megatron's DDP; return ``None`` if none is trainable."""
    if not any(parameter.requires_grad for parameter in whole.values()):
        return None
    # DDP takes a module. Names must not contain dots, so they use slashes.
    holder = nn.Module()
    for name, parameter in whole.items():
        holder.register_parameter(name.replace(".", "/"), parameter)
    distributed = megatron("core.distributed")
    config = distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=_reduce_dtype(self.config, options) is torch.float32,
        check_for_nan_in_grad=is_checked,
    )
    return distributed.DistributedDataParallel(self.config, config, holder)


def reduce_whole_gradients(original: _Function, context: Context[Options]) -> _Function:
    """Decorate ``finish_grad_sync`` to reduce unsharded gradients; backward has reduced the sharded ones."""
    megatron = context.megatron

    def finish_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        whole = getattr(self, _WHOLE)
        if whole.sharded is not None:
            whole.sharded.check()
        if whole.is_checked:
            _require_finite(shards.sharded_gradients(self.module), megatron)
        if whole.ddp is not None:
            whole.ddp.finish_grad_sync(*args, **kwargs)

    return finish_grad_sync


def _require_finite(gradients: list[Tensor], megatron: Megatron) -> None:
    """End the job, or repeat the step as ``--rerun-mode`` says, if gradients are NaN or infinite."""
    norm = nn.utils.get_total_norm(gradients)
    machine = megatron("core.rerun_state_machine").get_rerun_state_machine()
    for kind, rejects in (("NaN", torch.isnan), ("Inf", torch.isinf)):
        machine.validate_result(
            result=norm,
            rejection_func=rejects,
            message=f"fsdp2: found {kind} in the norm of this rank's shards of gradients",
            tolerance=0.001,
            fatal=True,
        )


def scale_all_gradients(original: _Function) -> _Function:
    """Decorate ``scale_gradients`` to scale both sharded and unsharded gradients."""

    def scale_gradients(self: Any, scaling_factor: Any) -> None:
        for gradient in shards.sharded_gradients(self.module):
            gradient.mul_(scaling_factor)
        if (ddp := getattr(self, _WHOLE).ddp) is not None:
            ddp.scale_gradients(scaling_factor)

    return scale_gradients


def zero_whole_gradients(original: _Function) -> _Function:
    """Decorate ``zero_grad_buffer`` to clear unsharded gradients; the optimizer drops sharded ones."""

    def zero_grad_buffer(self: Any) -> None:
        if (ddp := getattr(self, _WHOLE).ddp) is not None:
            ddp.zero_grad_buffer()

    return zero_grad_buffer


# -- Megatron's helpers for sharded tensors ---------------------------------------------------------


def to_local_if_dtensor(tensor: Any) -> Any:
    """Return this rank's local shard; replaces the function of this name and ``_unshard_if_dtensor``."""
    return local_of(tensor)


def shard_group_if_dtensor(tensor: Any, data_parallel_group: Any = None) -> Any:
    """Return the process group of a tensor's shards; replaces ``get_data_parallel_group_if_dtensor``.

    Args:
        tensor: parameter or gradient.
        data_parallel_group: group found for previous tensors, returned if ``tensor`` is not sharded; ``None``
            at first.
    """
    if not isinstance(tensor, DTensor):
        return data_parallel_group
    return tensor.device_mesh.get_group(shard_axis(tensor))


def gradient_in_place(tensor_to_shard: Tensor, reference_tensor: Any) -> Any:
    """Return the gradient itself; replaces ``_reshard_if_dtensor``.

    Args:
        tensor_to_shard: local shard from :func:`to_local_if_dtensor`, reduced in place.
        reference_tensor: gradient that shares memory with the shard.
    """
    return reference_tensor


def describe_whole_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``_collect_main_grad_data_for_unscaling`` to return ``DTensor`` for all gradients, or none."""
    # One fused operator works on all gradients. torch looks at the first one to decide whether ranks exchange
    # the flag for infinities, so shards come first.

    def collect(self: Any) -> Any:
        gradients = original(self) or []
        pieces = [grad for grad in gradients if isinstance(grad, DTensor)]
        if len(pieces) in (0, len(gradients)):
            return gradients
        mesh = pieces[0].device_mesh
        everywhere = [Replicate()] * mesh.ndim
        return pieces + [
            DTensor.from_local(grad, mesh, everywhere, run_check=False)
            for grad in gradients
            if not isinstance(grad, DTensor)
        ]

    return collect


# -- arguments --------------------------------------------------------------------------------------

_CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def validate_beside_experts_and_pipelines(
    original: Callable[..., Any], context: Context[Options]
) -> Callable[..., Any]:
    """Decorate ``validate_args`` to hide FSDP2 from the check that rejects it with pipelines or experts."""
    # `check_fsdp2` makes the checks that Megatron would make otherwise. This wrapper sets the values that
    # Megatron would derive from the flag.

    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        try:
            return validated(args, *rest, **kwargs)
        finally:
            # Megatron's own validation may change it.
            context.state(CheckedGradients).wanted = bool(argument(args, "check_for_nan_in_loss_and_grad"))

    def validated(args: Any, *rest: Any, **kwargs: Any) -> Any:
        alone = args.pipeline_model_parallel_size == 1 and args.expert_model_parallel_size == 1
        if alone or not getattr(args, "use_torch_fsdp2", False):
            return original(args, *rest, **kwargs)
        args.use_torch_fsdp2 = False
        try:
            # Tensor parallelism without FSDP2 would require CUDA_DEVICE_MAX_CONNECTIONS=1.
            with mock.patch.dict(os.environ, _CONNECTIONS):
                result = original(args, *rest, **kwargs)
        finally:
            args.use_torch_fsdp2 = True
        streams = getattr(args, "high_priority_stream_groups", None)
        if streams is not None:
            streams += [group for group in ("dp_cp", "ep_dp") if group not in streams]
        return result

    return validate_args
