"""Training settings and features of a job from its arguments."""

from __future__ import annotations

import argparse
import math

from mindspeed_dsa.megatron.batches import entries_of
from mindspeed_dsa.megatron.dsa import OWN
from mindspeed_dsa.megatron.graphs import captured
from mindspeed_dsa.megatron.low_precision import low_precision
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.tools.planner.job import Features, Sharding, Training

_BYTES = {None: 4, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes of an element, by the name of its dtype; without a name fp32."""


def training_of(options: argparse.Namespace) -> Training:
    """Return the settings for batch sizes, precisions and Megatron's own recomputation."""
    engine, sizes = options.transformer_impl == "transformer_engine", batch_sizes(options)
    selective = options.recompute_activations or options.recompute_granularity == "selective"
    modules = tuple(options.recompute_modules or ["core_attn"]) if selective else ()
    full, group = 0, 1
    if options.recompute_granularity == "full":
        number = options.recompute_num_layers or 1
        uniform = options.recompute_method != "block"
        pairs = options.moe_fb_overlap  # in pairs, every layer keeps its own input
        full, group = (-1, 1 if pairs else number) if uniform else (number, 1)
    bf16 = options.bf16 or options.fp16
    # Megatron's own linear layers do not multiply in fp8.
    precision = low_precision(options) if engine else None
    stored = precision is not None and precision.stored
    reduced_in_bf16 = (
        options.fsdp2_reduce_dtype == "bf16" if options.use_torch_fsdp2 else options.grad_reduce_in_bf16
    )
    return Training(
        sequence=options.seq_length,
        micro=options.micro_batch_size,
        batch=max(sizes, default=options.global_batch_size or 0),
        bf16=bf16,
        # Megatron reduces gradients in fp32 by default for bf16, but not for fp16.
        grad_half=(options.bf16 and (reduced_in_bf16 or options.main_grads_dtype == "bf16"))
        or (options.fp16 and not options.accumulate_allreduce_grads_in_fp32),
        distributed=options.use_distributed_optimizer,
        adam=options.optimizer == "adam",
        overlap_grad=options.overlap_grad_reduce,
        overlap_param=options.overlap_param_gather,
        kernels=engine,
        fused_glu=options.bias_swiglu_fusion,
        flash=engine or options.use_flash_attn or options.multi_latent_attention,
        grouped=options.moe_grouped_gemm,
        full=full,
        full_group=group,
        modules=modules,
        flex=options.moe_token_dispatcher_type == "flex",
        masters=_BYTES[options.main_params_dtype],
        moments=_BYTES[options.exp_avg_dtype] + _BYTES[options.exp_avg_sq_dtype],
        graphs=bool(captured(options)),
        fp8=precision is not None,
        stored=stored,
        # Numbers of mxfp8 by rows and by columns have other scales, so Megatron gathers bf16.
        gathers=stored and options.fp8_recipe != "mxfp8",
        dropout=options.hidden_dropout > 0,
        attention_dropout=options.attention_dropout > 0,
        schedule=sizes,
    )


def batch_sizes(options: argparse.Namespace) -> tuple[int, ...]:
    """Return the batch sizes of ``--step-batch-size-schedule``; empty without it."""
    schedule = options.step_batch_size_schedule
    return tuple(size for _, size in entries_of(schedule)) if schedule else ()


def sharding_of(options: argparse.Namespace) -> Sharding | None:
    """Return the FSDP settings; None without FSDP."""
    if not options.use_torch_fsdp2:
        return None
    prefetch = 1 if options.fsdp2_prefetch is None else options.fsdp2_prefetch
    return Sharding(options.fsdp2_sharding_size or 0, prefetch, bool(options.fsdp2_shard_experts))


def _gib(word: str) -> float:
    try:
        return math.inf if word == "all" else float(word)
    except ValueError:
        raise SettingsError(
            f"mindspeed_dsa plan: --virtual-optimizer {word}: give all, or GiB of each pipeline rank"
        ) from None


def features_of(options: argparse.Namespace) -> Features:
    """Return the values of this library's flags that change a plan."""
    fused = options.use_fused_dsa and options.experimental_attention_variant == "dsa"

    def part(value: bool | None) -> bool:
        return fused if value is None else bool(value)

    virtual = options.virtual_optimizer or ()
    loss = options.fused_linear_cross_entropy_gradient if options.fused_linear_cross_entropy else ""
    least = options.swap_attention_min_bytes
    return Features(
        absorb=part(options.use_dsa_absorb),
        by_length=options.use_dsa_absorb is not True,
        indexer=part(options.use_fused_lightning_indexer),
        attention=part(options.use_fused_sparse_flash_attention),
        kl_loss=part(options.use_fused_lightning_indexer_kl_loss),
        served_losses=options.dsa_indexer_loss_layers != OWN,
        divided_vocabulary=options.cp_shard_vocabulary,
        reuse=options.reuse_fp32_param,
        swap_optimizer=options.swap_optimizer,
        swap_parts=int(options.swap_optimizer_times or 16),
        virtual=tuple(_gib(str(word)) for word in virtual),
        recompute_norm=options.recompute_norm,
        norm_layers=options.recompute_norm_num_layers,
        recompute_act=options.recompute_activation_function,
        act_layers=options.recompute_activation_function_num_layers,
        swap_attention=bool(options.swap_attention),
        swap_auto=options.swap_attention == "auto",
        swap_bytes=math.inf if options.swap_attention_bytes is None else options.swap_attention_bytes,
        swap_layers=options.swap_attention_num_layers,
        swap_modules=tuple(str(options.swap_modules or "self_attention").split(",")),
        swap_least=2**20 if least is None else int(least),
        permute_fusion=options.moe_permute_fusion,
        alltoall_overlap=options.moe_alltoall_overlap_comm,
        pairs=options.moe_fb_overlap or options.overlap_moe_expert_parallel_comm,
        split=options.splits_backward,
        waiting=options.split_backward_waiting,
        batch_overlap=options.moe_batch_overlap,
        coc=options.use_ascend_coc or options.use_ascend_mc2,
        sp_tp_sp=options.mla_sp_tp_sp,
        keep_gathered=options.cp_keep_gathered,
        warmup_stage=options.dsa_stage == "warmup",
        chunked_loss=loss,
    )
