"""Megatron's GPTModel with MLA, sparse attention and experts, its optimizer and its schedule."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import traceback
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig

import mindspeed_dsa
from dsa_job.errors import UsageError

_LAYOUT = "pipeline_model_parallel_layout"


def from_args(kind: Any, args: argparse.Namespace, **more: Any) -> Any:
    """Build a Megatron configuration from the flags named like its fields, unless unset, and ``more``."""
    names = {field.name for field in dataclasses.fields(kind)}
    values = {name: value for name, value in vars(args).items() if name in names} | more
    return kind(**{name: value for name, value in values.items() if value is not None})


def model_config(args: argparse.Namespace) -> MLATransformerConfig:
    """Return Megatron's configuration of the model."""
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    moe: dict[str, Any] = {}
    if not args.num_moe_experts:
        moe = {"moe_layer_freq": 1, "moe_ffn_hidden_size": None, "moe_router_enable_expert_bias": False}
        moe["moe_shared_expert_intermediate_size"] = None
    # Megatron takes one name for all layers, or a list with a name for each layer.
    comm_types = args.cp_comm_type or []
    if args.pipeline_model_parallel_layout and not hasattr(MLATransformerConfig, _LAYOUT):
        raise UsageError("--pipeline-model-parallel-layout needs megatron-core 0.14 or later")
    return from_args(
        MLATransformerConfig,
        args,
        cp_comm_type=comm_types[0] if len(comm_types) == 1 else comm_types or None,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        batch_p2p_comm=not args.overlap_p2p_comm,
        deallocate_pipeline_outputs=True,
        deterministic_mode=bool(args.deterministic_mode),
        **moe,
    )


def check_config(args: argparse.Namespace) -> None:
    """Let Megatron check the configuration, without a process group; raise UsageError with its message."""
    try:
        model_config(args)
    except (AssertionError, ValueError, TypeError) as error:
        if isinstance(error, mindspeed_dsa.MindSpeedDSAError):
            raise
        line = traceback.extract_tb(error.__traceback__)[-1].line  # source of an assertion without a message
        raise UsageError(
            f"Megatron refuses this model: {error if str(error) else line}; change or omit what this names"
        ) from error


def build_model(args: argparse.Namespace, config: MLATransformerConfig) -> list[Any]:
    """Build the chunks of this pipeline rank; one unless the pipeline is interleaved."""
    chunks = args.virtual_pipeline_model_parallel_size
    modules: list[Any] = [
        _build_chunk(args, config, stage) for stage in (range(chunks) if chunks else [None])
    ]
    for module in modules:
        for parameter in module.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        module.cuda(torch.cuda.current_device())
    if args.bf16:
        modules = [Float16Module(config, module) for module in modules]
    if args.use_torch_fsdp2:
        # Before 0.14 it is in another module.
        from megatron.core.distributed.torch_fully_sharded_data_parallel_config import (
            TorchFullyShardedDataParallelConfig,
        )

        sharded = TorchFullyShardedDataParallelConfig()
        return [TorchFullyShardedDataParallel(config, sharded, module) for module in modules]
    # Megatron's own default: 40 million elements, or more with over 40 data parallel ranks.
    buckets = args.ddp_bucket_size or max(
        40_000_000, 1_000_000 * parallel_state.get_data_parallel_world_size()
    )
    ddp_config = from_args(
        DistributedDataParallelConfig,
        args,
        grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
        # Without overlap all gradients are reduced at once, in a single bucket.
        bucket_size=buckets if args.overlap_grad_reduce else None,
    )
    return [
        # The other chunks' communication overlaps with compute anyway: no buckets for them.
        DistributedDataParallel(config, ddp_config, module, disable_bucketing=index > 0)
        for index, module in enumerate(modules)
    ]


def _build_chunk(args: argparse.Namespace, config: MLATransformerConfig, stage: int | None) -> GPTModel:
    which: dict[str, Any] = {}
    if stage is not None:
        which = accepted(GPTModel.__init__, vp_stage=stage)
        if not which:  # before 0.13 Megatron reads the chunk from its global state
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
    transformer_engine = args.transformer_impl == "transformer_engine"
    block = _block_spec(args, config, which)
    mtp = None
    if args.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, block, transformer_engine, **which)
    is_first, is_last = parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage
    where = {} if stage is None else accepted(is_first, ignore_virtual=False, vp_stage=stage)
    model = GPTModel(
        config,
        block,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=is_first(**where),
        post_process=is_last(**where),
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=args.rotary_base,
        mtp_block_spec=mtp,
        **which,
    )
    model.vp_stage = stage
    return model


def _block_spec(args: argparse.Namespace, config: MLATransformerConfig, which: dict[str, Any]) -> Any:
    """Return Megatron's own spec of this rank's layers."""
    if args.experimental_attention_variant:
        try:  # from 0.16 on
            specs = importlib.import_module(
                "megatron.core.models.gpt.experimental_attention_variant_module_specs"
            )
        except ModuleNotFoundError:
            pass
        else:
            return specs.get_transformer_block_with_experimental_attention_variant_spec(config, **which)
    # Before 0.16 there is one spec for all MLA layers, and mindspeed_dsa builds DSA into it.
    transformer_engine = args.transformer_impl == "transformer_engine"
    normalization = None if transformer_engine else args.normalization
    return get_gpt_decoder_block_spec(config, transformer_engine, normalization=normalization, **which)


def accepted(function: Any, **arguments: Any) -> dict[str, Any]:
    """Return the arguments that a function of the installed Megatron release accepts."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in parameters}


def build_optimizer(args: argparse.Namespace, model: list[DistributedDataParallel]) -> MegatronOptimizer:
    """Build the optimizer that the flags describe."""
    optimizer = get_megatron_optimizer(from_args(OptimizerConfig, args), model)
    if args.optimizer == "sgd":
        for each in getattr(optimizer, "chained_optimizers", [optimizer]):
            each.init_state_fn = _create_momentum
    return optimizer


def _create_momentum(optimizer: torch.optim.SGD, config: OptimizerConfig | None = None) -> None:
    """Create SGD's momentum, so that a checkpoint can be loaded into it; Megatron does so only for Adam."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def build_scheduler(args: argparse.Namespace, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Build the learning rate schedule, counted in samples as in Megatron."""
    batch = args.global_batch_size
    # --train-iters 0 makes no step, but Megatron's schedule needs at least one.
    steps = max(args.train_iters, 1)
    decay_steps = args.lr_decay_iters or steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        # Megatron requires a warmup that is shorter than the decay.
        lr_warmup_steps=min(args.lr_warmup_iters, decay_steps - 1) * batch,
        lr_decay_steps=decay_steps * batch,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=steps * batch,
        wd_incr_style="constant",
    )


def unwrapped(chunk: Any) -> GPTModel:
    """Return the model without its data parallel and bf16 wrappers."""
    while isinstance(chunk, (DistributedDataParallel, TorchFullyShardedDataParallel, Float16Module)):
        chunk = chunk.module
    return chunk
