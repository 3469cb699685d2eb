"""Everything that can be refused before a process group exists, all problems at once."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import util as importlib_util

from dsa_job.errors import UsageError
from dsa_job.files import number


@dataclass(frozen=True)
class World:
    """Place of this process among all, as torchrun describes it in the environment."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> World:
        """Read ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``; a lone process has none of them.

        Raises:
            UsageError: one of them is not a number.
        """
        names = {"rank": ("RANK", 0), "size": ("WORLD_SIZE", 1), "local_rank": ("LOCAL_RANK", 0)}
        values = {}
        for field, (name, default) in names.items():
            text = os.environ.get(name, str(default))
            value = number(text)
            if value is None:
                raise UsageError(
                    f"environment variable {name} is {text!r}, not a number; launch with torchrun"
                )
            values[field] = value
        return cls(**values)


def data_parallel_size(args: argparse.Namespace, world_size: int) -> int:
    """Ranks that hold the same part of the model's dense layers."""
    return world_size // (args.tensor_model_parallel_size * args.pipeline_model_parallel_size)


def padded_vocab_size(args: argparse.Namespace, vocab_size: int) -> int:
    """Vocabulary rounded up; on purpose the same for every tensor parallel size.

    Megatron-LM pads to a multiple that grows with the tensor parallel size, and so gives the same
    model another softmax in another layout.
    """
    step = args.make_vocab_size_divisible_by
    return -(-vocab_size // step) * step


def check(args: argparse.Namespace, world: World) -> None:
    """Refuse what cannot work.

    Raises:
        UsageError: lists every problem found.
    """
    problems = [*_check_numbers(args)]
    if not problems:  # the rest divides by these numbers
        for part in (_check_layout, _check_batch, _check_model, _check_combinations, _check_packages):
            problems += part(args, world)
    if problems:
        raise UsageError(problems)


_POSITIVE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "make_vocab_size_divisible_by",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "dsa_indexer_n_heads",
    "dsa_indexer_head_dim",
    "dsa_indexer_topk",
    "log_interval",
)
_POSITIVE_IF_SET = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "exit_interval",
    "expert_tensor_parallel_size",
    "ddp_bucket_size",
    "recompute_num_layers",
    "microbatch_group_size_per_vp_stage",
)
_NOT_NEGATIVE = (
    "train_iters",
    "save_interval",
    "eval_interval",
    "eval_iters",
    "lr_warmup_iters",
    "lr",
    "min_lr",
    "weight_decay",
    "clip_grad",
    "hidden_dropout",
    "attention_dropout",
)


def _flag(dest: str) -> str:
    return "--" + dest.replace("_", "-").replace("vp-stage", "virtual-pipeline-stage")


def _check_numbers(args: argparse.Namespace) -> Iterator[str]:
    for name in _POSITIVE:
        if getattr(args, name) < 1:
            yield f"{_flag(name)} is {getattr(args, name)}; it must be at least 1"
    for name in _POSITIVE_IF_SET:
        value = getattr(args, name)
        if value is not None and value < 1:
            yield f"{_flag(name)} is {value}; it must be at least 1"
    for name in _NOT_NEGATIVE:
        if not getattr(args, name) >= 0:
            yield f"{_flag(name)} is {getattr(args, name)}; it must be 0 or more"
    if args.num_moe_experts is not None and args.num_moe_experts < 1:
        yield f"--num-experts is {args.num_moe_experts}; it must be 0 (no experts) or more"


def _check_layout(args: argparse.Namespace, world: World) -> Iterator[str]:
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    ep, etp = args.expert_model_parallel_size, args.expert_tensor_parallel_size or tp
    if world.size % (tp * pp):
        yield (
            f"{world.size} processes cannot be cut into tensor parallel {tp} x pipeline parallel {pp}; "
            f"start a multiple of {tp * pp}, as in: torchrun --nproc-per-node {tp * pp} ..."
        )
        return
    if args.num_layers % pp:
        yield f"--num-layers {args.num_layers} is not divisible by --pipeline-model-parallel-size {pp}"
    elif args.num_layers_per_virtual_pipeline_stage or args.num_virtual_stages_per_pipeline_rank:
        yield from _check_interleaving(args, pp)
    for name in ("num_attention_heads", "ffn_hidden_size"):
        if getattr(args, name) % tp:
            yield f"{_flag(name)} {getattr(args, name)} is not divisible by --tensor-model-parallel-size {tp}"
    if args.make_vocab_size_divisible_by % tp:
        yield (
            f"--make-vocab-size-divisible-by {args.make_vocab_size_divisible_by} is not divisible by "
            f"--tensor-model-parallel-size {tp}"
        )
    if args.sequence_parallel and tp == 1:
        yield "--sequence-parallel needs --tensor-model-parallel-size of 2 or more; drop it or raise the size"
    if args.sequence_parallel and args.seq_length % tp:
        yield f"--seq-length {args.seq_length} is not divisible by --tensor-model-parallel-size {tp}"
    if args.num_moe_experts:
        if args.num_moe_experts % ep:
            yield (
                f"--num-experts {args.num_moe_experts} is not divisible by --expert-model-parallel-size {ep}"
            )
        if world.size % (ep * etp * pp):
            yield (
                f"{world.size} processes cannot be cut into expert parallel {ep} x expert tensor parallel "
                f"{etp} x pipeline parallel {pp}; start a multiple of {ep * etp * pp}"
            )
        if args.moe_ffn_hidden_size % etp:
            yield (
                f"--moe-ffn-hidden-size {args.moe_ffn_hidden_size} is not divisible by expert tensor "
                f"parallel {etp}"
            )
        shared = args.moe_shared_expert_intermediate_size
        if shared and shared % tp:
            yield f"--moe-shared-expert-intermediate-size {shared} is not divisible by tensor parallel {tp}"
        if tp > 1 and not args.sequence_parallel:
            yield "experts with tensor parallelism train only with --sequence-parallel; add it"
    elif ep > 1:
        yield f"--expert-model-parallel-size {ep} needs experts; set --num-experts"


def _check_interleaving(args: argparse.Namespace, pp: int) -> Iterator[str]:
    per_chunk, chunks = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    per_rank = args.num_layers // pp
    if per_chunk and chunks:
        yield (
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank say the "
            "same; keep one of them"
        )
    elif pp == 1:
        yield "an interleaved pipeline needs --pipeline-model-parallel-size of 2 or more"
    elif per_rank % (per_chunk or chunks):
        name = (
            "num_layers_per_virtual_pipeline_stage" if per_chunk else "num_virtual_stages_per_pipeline_rank"
        )
        yield (
            f"each pipeline rank holds {per_rank} layers, which {_flag(name)} {per_chunk or chunks} does not "
            "divide"
        )
    elif args.virtual_pipeline_model_parallel_size and not args.overlap_p2p_comm and pp == 2:
        yield (
            "an interleaved pipeline over 2 ranks needs overlapped communication; "
            "drop --no-overlap-p2p-communication or use 4 ranks"
        )


def _check_batch(args: argparse.Namespace, world: World) -> Iterator[str]:
    replicas = data_parallel_size(args, world.size)
    if not replicas:
        return
    per_microbatch = args.micro_batch_size * replicas
    if args.global_batch_size % per_microbatch:
        yield (
            f"--global-batch-size {args.global_batch_size} is not divisible by --micro-batch-size "
            f"{args.micro_batch_size} x data parallel {replicas}; use a multiple of {per_microbatch}"
        )
        return
    if args.virtual_pipeline_model_parallel_size:
        pp = args.pipeline_model_parallel_size
        microbatches = args.global_batch_size // per_microbatch
        group = args.microbatch_group_size_per_vp_stage or pp
        if not pp <= group <= microbatches or 0 < microbatches % group < pp:
            yield (
                f"an interleaved pipeline over {pp} ranks cannot run {microbatches} microbatches in groups "
                f"of {group}; choose --global-batch-size so that their number is a multiple of {pp}"
            )


def _check_model(args: argparse.Namespace, world: World) -> Iterator[str]:
    if args.qk_pos_emb_head_dim % 2:
        yield f"--qk-pos-emb-head-dim {args.qk_pos_emb_head_dim} must be even: rotary embeddings turn pairs"
    if args.experimental_attention_variant == "dsa":
        dims = args.dsa_indexer_head_dim
        if dims & (dims - 1):
            yield f"--dsa-indexer-head-dim {dims} must be a power of two, for the indexer's Hadamard rotation"
        if dims < args.qk_pos_emb_head_dim:
            yield (
                f"--dsa-indexer-head-dim {dims} is smaller than --qk-pos-emb-head-dim "
                f"{args.qk_pos_emb_head_dim}, which the indexer's heads must hold"
            )
    elif args.transformer_impl == "local":
        yield (
            "Megatron's local modules have no dense attention for MLA; use --transformer-impl "
            f"transformer_engine, or dsa with --dsa-indexer-topk {args.seq_length}, which selects every key"
        )
    pattern = args.moe_layer_freq
    if isinstance(pattern, list) and (len(pattern) != args.num_layers or set(pattern) - {0, 1}):
        yield f"--moe-layer-freq {pattern} must be {args.num_layers} zeros and ones, one per layer"
    if args.num_moe_experts and args.moe_router_topk > args.num_moe_experts:
        yield f"--moe-router-topk {args.moe_router_topk} is more than the {args.num_moe_experts} experts"
    if (
        args.num_moe_experts
        and args.moe_router_enable_expert_bias
        and args.moe_router_score_function != "sigmoid"
    ):
        yield (
            "the router's expert bias needs sigmoid scores; add --no-moe-router-enable-expert-bias or use "
            "--moe-router-score-function sigmoid"
        )


def _check_combinations(args: argparse.Namespace, world: World) -> Iterator[str]:
    if args.overlap_param_gather and not (args.use_distributed_optimizer and args.overlap_grad_reduce):
        yield "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce; add them"
    if args.recompute_granularity == "full" and not (args.recompute_method and args.recompute_num_layers):
        yield "--recompute-granularity full needs --recompute-method and --recompute-num-layers; add them"
    if args.recompute_granularity != "full" and args.recompute_method:
        yield "--recompute-method goes with --recompute-granularity full; add that or drop it"
    if args.recompute_modules and args.recompute_granularity != "selective":
        yield "--recompute-modules goes with --recompute-granularity selective; add it"
    if args.grad_reduce_in_bf16 and not args.bf16:
        yield "--grad-reduce-in-bf16 needs --bf16"
    if (
        args.lr_warmup_iters
        and args.train_iters
        and args.lr_warmup_iters >= (args.lr_decay_iters or args.train_iters)
    ):
        yield (
            f"--lr-warmup-iters {args.lr_warmup_iters} leaves nothing of the "
            f"{args.lr_decay_iters or args.train_iters} steps of the schedule; lower it"
        )
    if args.ckpt_step is not None and not args.load:
        yield "--ckpt-step goes with --load"
    if args.min_lr > args.lr:
        yield f"--min-lr {args.min_lr} is more than --lr {args.lr}; lower it"
    if not args.train_iters and not args.save:
        yield "--train-iters 0 only saves the initial weights; name a folder for them with --save"
    try:
        shares = [float(part) for part in args.split.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or not shares[0]:
        yield f"--split {args.split!r} must be weights of training and held-out documents, as in 95,5"
    if args.no_save and (args.save or args.exit_interval):
        yield "--no-save contradicts --save and --exit-interval; drop one"


def _check_packages(args: argparse.Namespace, world: World) -> Iterator[str]:
    wanted = {"megatron.core": "pip install megatron-core==0.16.1"}
    if args.tokenizer_model:
        wanted["tokenizers"] = "pip install tokenizers"
    if not args.no_tensorboard:
        wanted["tensorboard"] = "pip install tensorboard, or add --no-tensorboard"
    if not args.no_plot:
        wanted["matplotlib"] = "pip install matplotlib, or add --no-plot"
    if args.transformer_impl == "transformer_engine":
        wanted["transformer_engine"] = (
            "install Transformer Engine, or drop --transformer-impl transformer_engine"
        )
    for package, remedy in wanted.items():
        try:
            found = importlib_util.find_spec(package) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            yield f"package {package} is missing: {remedy}"
