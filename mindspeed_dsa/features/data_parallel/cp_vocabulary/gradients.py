"""Gradient buffers and an optimizer for weights that differ between context parallel ranks.

Megatron's ``DistributedDataParallel`` sums gradients over data and context parallel ranks together. A second
instance, with groups of its own, sums the gradients of the vocabulary's parts over data parallel ranks only.
The first instance then treats the second one's buffers as its own, so that schedules need not know of them.
The parts also have an optimizer of their own, chained to the others like the optimizer of experts.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.megatron import across_layouts
from mindspeed_dsa.megatron.vocabulary_shards import shard_of
from mindspeed_dsa.parallel.groups import subgroup

_PART = "_mindspeed_dsa_vocabulary_ddp"


class _Holder(nn.Module):
    """Module of the parameters that the second instance of ``DistributedDataParallel`` reduces."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        # Names must not contain dots.
        for name, parameter in parameters.items():
            self.register_parameter(name.replace(".", "/"), parameter)


def reduce_apart(original: Callable[..., None], context: Context[None]) -> Callable[..., None]:
    """Decorate ``DistributedDataParallel.__init__``: give parts of the vocabulary buffers of their own."""

    def __init__(
        self: Any, config: Any, ddp_config: Any, module: nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        if isinstance(module, _Holder):
            original(self, config, ddp_config, module, *args, **kwargs)
            return
        parts = {name: each for name, each in module.named_parameters() if shard_of(each) is not None}
        with _frozen(parts.values()) as trained:
            original(self, config, ddp_config, module, *args, **kwargs)
        apart = {name: parameter for name, parameter in parts.items() if parameter in trained}
        # Also without parts: all ranks build the optimizer of parts together.
        _join(self, _ddp(self, config, ddp_config, apart, context.megatron))

    return __init__


@contextlib.contextmanager
def _frozen(parameters: Iterable[nn.Parameter]) -> Iterator[set[nn.Parameter]]:
    """Hide parameters from Megatron inside the block, which skips those without a gradient.

    Yields:
        The parameters that had a gradient.
    """
    trained = {parameter for parameter in parameters if parameter.requires_grad}
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield trained
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _ddp(self: Any, config: Any, ddp_config: Any, apart: dict[str, nn.Parameter], megatron: Megatron) -> Any:
    state = megatron("core.parallel_state")
    ranks = state.get_context_parallel_world_size()
    ddp = type(self)(config, ddp_config, _Holder(apart), pg_collection=_groups(megatron))
    if not config.calculate_per_token_loss:
        # Gradients contain the losses of all context parallel ranks already: a sum, where a mean is wanted.
        for buffer in ddp.buffers:
            for part in (buffer, *buffer.buckets):
                part.gradient_scaling_factor /= ranks
    return ddp


def _groups(megatron: Megatron) -> Any:
    """Return groups of Megatron in which each context parallel rank has other weights."""
    state = megatron("core.parallel_state")
    groups = megatron("core.process_groups_config").ProcessGroupCollection()
    replicas = state.get_data_parallel_group(with_context_parallel=False)
    groups.dp = groups.dp_cp = replicas
    groups.tp, groups.pp = state.get_tensor_model_parallel_group(), state.get_pipeline_model_parallel_group()
    groups.ep, groups.expt_dp = (
        state.get_expert_model_parallel_group(),
        state.get_expert_data_parallel_group(),
    )
    groups.tp_ep_pp = state.get_expert_tensor_model_pipeline_parallel_group()
    groups.intra_dist_opt = state.get_intra_distributed_optimizer_instance_group()
    return groups


def _join(ddp: Any, part: Any) -> None:
    """Let ``ddp`` synchronize, scale and clear the buffers of ``part`` along with its own."""
    ddp.buffers = [*ddp.buffers, *part.buffers]
    ddp.bucket_groups = [*ddp.bucket_groups, *part.bucket_groups]
    ddp.param_to_bucket_group.update(part.param_to_bucket_group)
    ddp.params_with_grad.extend(part.params_with_grad)
    # Not an attribute of the module, which would register the parameters a second time.
    vars(ddp)[_PART] = part


def optimize_apart(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Decorate ``get_megatron_optimizer``: chain an optimizer of the vocabulary's parts to Megatron's."""
    signature = inspect.signature(original)

    def get_megatron_optimizer(config: Any, model_chunks: list[Any], *args: Any, **kwargs: Any) -> Any:
        parts = [vars(chunk).get(_PART) for chunk in model_chunks]
        if None in parts:
            raise RuntimeError(
                "cp-shard-vocabulary: a model chunk is not wrapped in DistributedDataParallel; wrap it, "
                "or omit --cp-shard-vocabulary"
            )
        with _without(model_chunks, parts):
            others = original(config, model_chunks, *args, **kwargs)
        arguments = signature.bind(config, model_chunks, *args, **kwargs).arguments
        arguments.update(model_chunks=parts, use_gloo_process_groups=False)
        arguments["pg_collection"] = _groups(context.megatron)
        arguments["pg_collection"].mp = _model_ranks(context.megatron)
        arguments.pop("dump_param_to_param_group_map", None)
        last = original(**arguments)
        for optimizer in last.chained_optimizers:
            across_layouts.mark_vocabulary(optimizer)
        chained = context.megatron("core.optimizer.optimizer").ChainedOptimizer
        return chained([*others.chained_optimizers, *last.chained_optimizers])

    return get_megatron_optimizer


def save_apart(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``ChainedOptimizer.sharded_state_dict``: give the vocabulary's optimizer a key of its own.

    Without it, the state would be taken for the experts' where only one of both layouts has experts apart.
    """

    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = original(self, *args, **kwargs)
        keys = across_layouts.keys_of(self.chained_optimizers)
        if len(keys) == 1:  # saved without a number
            return state
        return {key: state[number] for number, key in enumerate(keys)}

    return sharded_state_dict


@contextlib.contextmanager
def _without(chunks: list[Any], parts: list[Any]) -> Iterator[None]:
    """Hide the parts' parameters and buffers from Megatron's optimizers inside the block."""
    buffers = [chunk.buffers for chunk in chunks]
    for chunk, part in zip(chunks, parts, strict=True):
        chunk.buffers = [buffer for buffer in chunk.buffers if buffer not in part.buffers]
    try:
        with _frozen(parameter for part in parts for parameter in part.module.parameters()):
            yield
    finally:
        for chunk, whole in zip(chunks, buffers, strict=True):
            chunk.buffers = whole


def _model_ranks(megatron: Megatron) -> dist.ProcessGroup:
    """Create the group of the ranks that have parts of one copy: tensor, context and pipeline parallel."""
    state = megatron("core.parallel_state")
    context = state.get_context_parallel_group()
    models: list[Any] = [None] * context.size()
    dist.all_gather_object(
        models, dist.get_process_group_ranks(state.get_model_parallel_group()), group=context
    )
    world = dist.group.WORLD
    assert world is not None
    return subgroup(world, sorted({rank for ranks in models for rank in ranks}))
