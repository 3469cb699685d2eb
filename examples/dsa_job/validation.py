"""Checks of everything that can be refused before a process group exists, all problems at once.

Megatron's own configuration checks some of this too, but later and one problem at a time.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import util as importlib_util

from dsa_job.errors import UsageError
from dsa_job.flags import FLAGS
from mindspeed_dsa.context_parallel.padding import Padding
from mindspeed_dsa.megatron.pipeline_chunks import Split
from mindspeed_dsa.runs.files import number


@dataclass(frozen=True)
class World:
    """Place of this process among all, from torchrun's environment variables."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> World:
        """Read ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``; a single process has none of them."""
        values = []
        for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
            text = os.environ.get(name, default)
            value = number(text)
            if value is None:
                raise UsageError(
                    f"environment variable {name} is {text!r}, not a number; launch with torchrun"
                )
            values.append(value)
        return cls(*values)


def data_parallel_size(args: argparse.Namespace, world_size: int) -> int:
    """Return the number of ranks that hold the same part of the model's dense layers."""
    return world_size // _ranks_of_a_replica(args)


def _ranks_of_a_replica(args: argparse.Namespace) -> int:
    """Return the number of ranks that hold different parts of the model, or of the same sequences."""
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    return int(model * args.context_parallel_size)


def padded_vocab_size(args: argparse.Namespace, vocab_size: int) -> int:
    """Return the vocabulary rounded up, to the same size in every layout, unlike in Megatron-LM."""
    step = args.make_vocab_size_divisible_by
    return -(-vocab_size // step) * step


def check(args: argparse.Namespace, world: World) -> None:
    """Raise a UsageError that lists everything that cannot work."""
    problems = []
    for dest, flag in FLAGS.items():
        value = getattr(args, dest)
        if flag.choices and value is not None and value not in flag.choices:  # from the environment
            problems.append(f"{flag.name} is {value!r}; choose from {', '.join(flag.choices)}")
        if flag.least is not None and value is not None and not value >= flag.least:  # false for NaN too
            problems.append(f"{flag.name} is {value}; it must be at least {flag.least}")
    if not problems:  # the rest divides by these numbers
        for part in (_check_layout, _check_batch, _check_model, _check_combinations, _check_packages):
            problems += part(args, world)
    if problems:
        raise UsageError(problems)


def _check_layout(args: argparse.Namespace, world: World) -> Iterator[str]:
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    cp, replica = args.context_parallel_size, _ranks_of_a_replica(args)
    ep, etp = args.expert_model_parallel_size, args.expert_tensor_parallel_size or tp
    if world.size % replica:
        context = f" x context parallel {cp}" if cp > 1 else ""
        yield (
            f"{world.size} processes cannot be split into tensor parallel {tp} x pipeline parallel {pp}"
            f"{context}; start a multiple of {replica}, as in: torchrun --nproc-per-node {replica} ..."
        )
        return
    divided = {
        "num_attention_heads": ("--tensor-model-parallel-size", tp),
        "ffn_hidden_size": ("--tensor-model-parallel-size", tp),
        "make_vocab_size_divisible_by": ("--tensor-model-parallel-size", tp),
    }
    # Padded sequences have a length that the ranks divide.
    is_padded = Padding.of(args).rows > 0
    if args.sequence_parallel and not is_padded:
        divided["seq_length"] = ("--tensor-model-parallel-size x --context-parallel-size", tp * cp)
    # Zigzag context parallelism gives each rank one chunk from either half of the sequence.
    if cp > 1 and args.seq_length % (2 * cp) and not is_padded:
        yield (
            f"--seq-length {args.seq_length} cannot be cut into two chunks for each of "
            f"--context-parallel-size {cp}; use a multiple of {2 * cp}"
        )
    if args.num_moe_experts:
        divided["num_moe_experts"] = ("--expert-model-parallel-size", ep)
        divided["moe_ffn_hidden_size"] = ("--expert-tensor-parallel-size", etp)
        if args.moe_shared_expert_intermediate_size:
            divided["moe_shared_expert_intermediate_size"] = ("--tensor-model-parallel-size", tp)
    for dest, (by, size) in divided.items():
        if getattr(args, dest) % size:
            yield f"{FLAGS[dest].name} {getattr(args, dest)} is not divisible by {by} {size}"
    yield from _check_stages(args, pp)
    if args.sequence_parallel and tp == 1:
        yield "--sequence-parallel needs --tensor-model-parallel-size of 2 or more; omit it or raise the size"
    # Groups of experts span data and context parallel ranks: only these three sizes must divide the world.
    if args.num_moe_experts and world.size % (ep * etp * pp):
        yield (
            f"{world.size} processes cannot be split into expert parallel {ep} x expert tensor parallel "
            f"{etp} x pipeline parallel {pp}; start a multiple of {ep * etp * pp}"
        )
    if args.num_moe_experts and tp > 1 and not args.sequence_parallel:
        yield "experts with tensor parallelism train only with --sequence-parallel; add it"
    if ep > 1 and not args.num_moe_experts:
        yield f"--expert-model-parallel-size {ep} needs experts; set --num-experts"


def _check_stages(args: argparse.Namespace, pp: int) -> Iterator[str]:
    """Yield problems of the layers' distribution over the ranks of a pipeline."""
    if args.schedules_method == "dualpipev":
        return  # the feature checks it
    if args.pipeline_model_parallel_layout is not None:
        yield from _check_pipeline_layout(args)
        return
    ends = [args.num_layers_in_first_pipeline_stage, args.num_layers_in_last_pipeline_stage]
    said = [layers for layers in ends if layers is not None]
    if not said:
        if args.num_layers % pp == 0:
            yield from _check_interleaving(args, pp)
        else:
            yield (
                f"--num-layers {args.num_layers} is not divisible by --pipeline-model-parallel-size {pp}; "
                "use a multiple, or give the first or last rank other layers by "
                "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers"
            )
        return
    between, ranks = args.num_layers - sum(said), pp - len(said)
    names = {"first": ends[0], "last": ends[1]}
    given = [f"--decoder-{name}-pipeline-num-layers {layers}" for name, layers in names.items() if layers]
    flags = " and ".join(given)
    if pp == 1:
        yield f"{flags}: a pipeline is needed; add --pipeline-model-parallel-size of 2 or more, or omit it"
    elif between < 0 or (between % ranks if ranks else between) or (ranks and not between):
        yield (
            f"{flags}: {between} of --num-layers {args.num_layers} are left for the other {ranks} pipeline "
            "ranks; give numbers that leave as many to each"
        )
    elif args.virtual_pipeline_model_parallel_size:
        yield f"{flags}: an interleaved pipeline deals layers out evenly; omit one or the other"


def _check_pipeline_layout(args: argparse.Namespace) -> Iterator[str]:
    try:
        split = Split.of(args)
    except ValueError as error:
        yield str(error)
        return
    if split is not None and split.problem:
        yield split.problem
    elif args.pipeline_model_parallel_size == 1:
        yield "--pipeline-model-parallel-layout needs --pipeline-model-parallel-size of 2 or more"
    other = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    ends = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    given = [FLAGS[name].name for name in other + ends if getattr(args, name)]
    if given:
        yield f"--pipeline-model-parallel-layout says it all; omit {' and '.join(given)}"


def _check_interleaving(args: argparse.Namespace, pp: int) -> Iterator[str]:
    names = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    flags = [(FLAGS[name].name, getattr(args, name)) for name in names if getattr(args, name)]
    if not flags:
        return
    (flag, parts), *another = flags
    per_rank = args.num_layers // pp
    if another:
        yield f"{flag} and {another[0][0]} say the same; keep one of them"
    elif pp == 1:
        yield "an interleaved pipeline needs --pipeline-model-parallel-size of 2 or more"
    elif per_rank % parts:
        yield f"each pipeline rank holds {per_rank} layers, which {flag} {parts} does not divide"
    elif args.virtual_pipeline_model_parallel_size and not args.overlap_p2p_comm and pp == 2:
        yield (
            "an interleaved pipeline over 2 ranks needs overlapped communication; "
            "omit --no-overlap-p2p-communication or use 4 ranks"
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
    pp, microbatches = args.pipeline_model_parallel_size, args.global_batch_size // per_microbatch
    if args.schedules_method == "dualpipev":
        if microbatches < 2 * pp:
            yield (
                f"--schedules-method dualpipev over {pp} ranks needs at least {2 * pp} microbatches, not "
                f"{microbatches}; raise --global-batch-size or lower --micro-batch-size"
            )
    elif args.virtual_pipeline_model_parallel_size:
        group = args.microbatch_group_size_per_vp_stage or pp
        # The schedule runs groups of microbatches; the last group may be smaller, but not than the pipeline.
        if not pp <= group <= microbatches or 0 < microbatches % group < pp:
            yield (
                f"an interleaved pipeline over {pp} ranks cannot run {microbatches} microbatches in groups "
                f"of {group}; choose --global-batch-size or --micro-batch-size so that their number is a "
                f"multiple of {pp}"
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
                f"{args.qk_pos_emb_head_dim}, which is part of the indexer's heads; make it at least as large"
            )
    pattern = args.moe_layer_freq
    if isinstance(pattern, list) and (len(pattern) != args.num_layers or set(pattern) - {0, 1}):
        yield f"--moe-layer-freq {pattern} must be {args.num_layers} zeros and ones, one per layer"
    if args.num_moe_experts:
        if args.moe_router_topk > args.num_moe_experts:
            yield f"--moe-router-topk {args.moe_router_topk} is more than the {args.num_moe_experts} experts"
        if args.moe_router_enable_expert_bias and args.moe_router_score_function != "sigmoid":
            yield (
                "the router's expert bias needs sigmoid scores; add --no-moe-router-enable-expert-bias or "
                "use --moe-router-score-function sigmoid"
            )


def _check_combinations(args: argparse.Namespace, world: World) -> Iterator[str]:
    if args.overlap_param_gather and not (args.use_distributed_optimizer and args.overlap_grad_reduce):
        yield "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce; add them"
    if args.use_distributed_optimizer and args.optimizer == "sgd":
        yield "--use-distributed-optimizer is for --optimizer adam in Megatron; omit one of them"
    if args.recompute_granularity == "full" and not (args.recompute_method and args.recompute_num_layers):
        yield (
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers; add them, "
            "as in --recompute-method uniform --recompute-num-layers 1, which recomputes every layer"
        )
    if args.recompute_granularity != "full" and args.recompute_method:
        yield "--recompute-method is for --recompute-granularity full; add that or omit it"
    if args.recompute_modules and args.recompute_granularity != "selective":
        yield "--recompute-modules is for --recompute-granularity selective; add it"
    if "moe_act" in (args.recompute_modules or ()) and not args.moe_grouped_gemm:
        yield (
            "--recompute-modules moe_act is for experts in one grouped GEMM; add --moe-grouped-gemm, or omit "
            "moe_act"
        )
    if args.grad_reduce_in_bf16 and not args.bf16:
        yield "--grad-reduce-in-bf16 needs --bf16"
    steps = args.lr_decay_iters or args.train_iters
    if args.train_iters and 0 < args.lr_warmup_iters >= steps:
        yield f"--lr-warmup-iters {args.lr_warmup_iters} leaves nothing of the {steps} scheduled steps"
    if args.load and args.load_hf:
        yield (
            f"--load {args.load} and --load-hf {args.load_hf} both say where the weights come from; omit one "
            "of them (a run that was interrupted goes on from its own checkpoints)"
        )
    if args.ckpt_step is not None and not args.load:
        yield "--ckpt-step needs --load"
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
        yield "--no-save contradicts --save and --exit-interval; omit one"


def _check_packages(args: argparse.Namespace, world: World) -> Iterator[str]:
    for package, remedy, wanted in (
        ("megatron.core", "pip install megatron-core==0.16.1", True),
        ("tokenizers", "pip install tokenizers", args.tokenizer_model),
        ("tensorboard", "pip install tensorboard, or add --no-tensorboard", not args.no_tensorboard),
        ("matplotlib", "pip install matplotlib, or add --no-plot", not args.no_plot),
        ("transformer_engine", "install it, or omit --transformer-impl", args.transformer_impl != "local"),
    ):
        if wanted and not _is_installed(package):
            yield f"package {package} is missing: {remedy}"


def _is_installed(package: str) -> bool:
    try:
        return importlib_util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
