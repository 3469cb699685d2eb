"""The flags of the job by group; names and meanings are Megatron's where Megatron has the flag."""

from __future__ import annotations

import argparse
import ast
from typing import Any

_Optional = argparse.BooleanOptionalAction


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag of the job itself."""
    _add_model(parser.add_argument_group("model"))
    _add_attention(parser.add_argument_group("attention (MLA and DSA)"))
    _add_experts(parser.add_argument_group("mixture of experts"))
    _add_training(parser.add_argument_group("training"))
    _add_parallel(parser.add_argument_group("parallelism"))
    _add_recompute(parser.add_argument_group("recompute"))
    _add_data(parser.add_argument_group("data"))
    _add_checkpoint(parser.add_argument_group("checkpoints"))
    _add_output(parser.add_argument_group("output"))


def layer_pattern(text: str) -> int | list[int]:
    """``2``, ``[0,1,1]`` or ``([0]*1+[1]*3)``, as Megatron's ``--moe-layer-freq`` takes them."""

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.List):
            return [value(item) for item in node.elts]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            return value(node.left) * value(node.right)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return value(node.left) + value(node.right)
        raise ValueError

    try:
        pattern = value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number nor a list such as '([0]*1+[1]*3)'"
        ) from None
    return pattern


def _add_model(group: Any) -> None:
    add = group.add_argument
    add("--num-layers", type=int, default=4, help="transformer layers")
    add("--hidden-size", type=int, default=128, help="width of the residual stream")
    add("--ffn-hidden-size", type=int, default=384, help="width of the dense layers' MLP")
    add("--num-attention-heads", type=int, default=4, help="attention heads")
    add("--seq-length", type=int, default=256, help="tokens per sequence")
    add(
        "--max-position-embeddings",
        type=int,
        default=None,
        help="longest position; the sequence length if unset",
    )
    add("--normalization", choices=("RMSNorm", "LayerNorm"), default="RMSNorm", help="kind of norm")
    add("--norm-epsilon", type=float, default=1e-6, dest="layernorm_epsilon", help="epsilon of the norms")
    add("--init-method-std", type=float, default=0.02, help="standard deviation of the initial weights")
    add("--hidden-dropout", type=float, default=0.0, help="dropout on the residual branches")
    add("--attention-dropout", type=float, default=0.0, help="dropout on attention weights")
    add(
        "--make-vocab-size-divisible-by",
        type=int,
        default=128,
        help="vocabulary is padded to a multiple of it",
    )
    add(
        "--untie-embeddings-and-output-weights",
        action=_Optional,
        default=True,
        help="output layer with weights of its own",
    )
    add("--mtp-num-layers", type=int, default=None, help="multi-token prediction layers")
    add(
        "--mtp-loss-scaling-factor", type=float, default=0.1, help="weight of the multi-token prediction loss"
    )
    add(
        "--transformer-impl",
        choices=("local", "transformer_engine"),
        default="local",
        help="modules of Megatron itself, or Transformer Engine's",
    )


def _add_attention(group: Any) -> None:
    add = group.add_argument
    add(
        "--experimental-attention-variant",
        choices=("dsa", "none"),
        default="dsa",
        help="dsa: DeepSeek sparse attention; none: dense MLA",
    )
    # The library's own switch, which it leaves off. This job is there to run the library: on, and a way out.
    add(
        "--use-fused-dsa",
        action=_Optional,
        default=True,
        help="sparse attention on mindspeed_dsa's operators; --no-use-fused-dsa: on Megatron's own code",
    )
    add("--q-lora-rank", type=int, default=64, help="rank of the compressed query")
    add("--kv-lora-rank", type=int, default=64, help="rank of the compressed key and value")
    add("--qk-head-dim", type=int, default=32, help="query and key dimensions per head without position")
    add(
        "--qk-pos-emb-head-dim",
        type=int,
        default=16,
        help="query and key dimensions per head that carry position",
    )
    add("--v-head-dim", type=int, default=32, help="value dimensions per head")
    add("--qk-layernorm", action=_Optional, default=True, help="norm on the compressed query and key-value")
    add("--rope-type", choices=("rope", "yarn"), default="rope", help="rotary embedding")
    add("--rotary-base", type=float, default=10000.0, help="base of the rotary embedding")
    add("--rotary-scaling-factor", type=float, default=1.0, help="YaRN: how far the context was stretched")
    add("--dsa-indexer-n-heads", type=int, default=8, help="heads of the indexer")
    add("--dsa-indexer-head-dim", type=int, default=32, help="dimensions per head of the indexer")
    add("--dsa-indexer-topk", type=int, default=48, help="keys that each query attends to")
    add(
        "--dsa-indexer-loss-coeff",
        type=float,
        default=0.01,
        help="weight of the indexer's loss; 0 trains none",
    )
    add(
        "--dsa-indexer-use-sparse-loss",
        action=_Optional,
        default=True,
        help="indexer's loss over the selected keys only",
    )


def _add_experts(group: Any) -> None:
    add = group.add_argument
    add(
        "--num-experts", type=int, default=4, dest="num_moe_experts", help="experts per layer; 0: dense model"
    )
    add(
        "--moe-layer-freq",
        type=layer_pattern,
        default=None,
        help="1 for a layer with experts, 0 for a dense one, as '([0]*1+[1]*3)'; unset: first layer dense",
    )
    add("--moe-ffn-hidden-size", type=int, default=128, help="width of each expert")
    add(
        "--moe-shared-expert-intermediate-size",
        type=int,
        default=128,
        help="width of the shared expert; 0: none",
    )
    add("--moe-router-topk", type=int, default=2, help="experts per token")
    add(
        "--moe-router-score-function",
        choices=("softmax", "sigmoid"),
        default="sigmoid",
        help="router's scores",
    )
    add("--moe-router-pre-softmax", action="store_true", help="softmax before the top-k choice")
    add("--moe-router-topk-scaling-factor", type=float, default=None, help="factor on the chosen scores")
    add("--moe-router-num-groups", type=int, default=None, help="groups of experts")
    add("--moe-router-group-topk", type=int, default=None, help="groups per token")
    add("--moe-router-dtype", choices=("fp32", "fp64"), default="fp32", help="precision of the router")
    add(
        "--moe-router-enable-expert-bias",
        action=_Optional,
        default=True,
        help="balance the load by a bias instead of a loss",
    )
    add("--moe-router-bias-update-rate", type=float, default=1e-3, help="step of that bias")
    add(
        "--moe-router-load-balancing-type",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
        default="seq_aux_loss",
        help="how the load is balanced",
    )
    add("--moe-aux-loss-coeff", type=float, default=1e-4, help="weight of the balancing loss")
    add("--moe-z-loss-coeff", type=float, default=None, help="weight of the router's z-loss")
    add(
        "--moe-token-dispatcher-type",
        choices=("allgather", "alltoall", "flex"),
        default="alltoall",
        help="how tokens reach their experts",
    )
    add("--moe-grouped-gemm", action="store_true", help="one grouped product for all experts of a rank")
    add("--moe-permute-fusion", action="store_true", help="fused token permutation")
    add("--moe-shared-expert-overlap", action="store_true", help="shared expert beside the dispatch")


def _add_training(group: Any) -> None:
    add = group.add_argument
    add("--micro-batch-size", type=int, default=4, help="sequences per microbatch")
    add("--global-batch-size", type=int, default=8, help="sequences per step")
    add("--train-iters", type=int, default=240, help="steps; 0 only saves the initial weights")
    add("--exit-interval", type=int, default=None, help="save and stop after a step divisible by this")
    add("--seed", type=int, default=1234, help="seed of weights, data order and dropout")
    add("--bf16", action="store_true", help="train in bfloat16 with float32 master weights")
    add("--optimizer", choices=("adam", "sgd"), default="adam", help="optimizer")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--min-lr", type=float, default=3e-4, help="lowest learning rate")
    add(
        "--lr-decay-style",
        choices=("constant", "linear", "cosine", "inverse-square-root"),
        default="cosine",
        help="shape of the decay",
    )
    add("--lr-decay-iters", type=int, default=None, help="steps of the decay; all steps if unset")
    add(
        "--lr-warmup-iters",
        type=int,
        default=None,
        help="steps of linear warm-up; unset: a tenth of all, but 10 at most",
    )
    add("--weight-decay", type=float, default=0.1, help="weight decay")
    add("--clip-grad", type=float, default=1.0, help="largest gradient norm; 0: no clipping")
    add("--adam-beta1", type=float, default=0.9, help="Adam's first moment")
    add("--adam-beta2", type=float, default=0.95, help="Adam's second moment")
    add("--adam-eps", type=float, default=1e-8, help="Adam's epsilon")
    add("--sgd-momentum", type=float, default=0.9, help="momentum of SGD")
    add(
        "--eval-interval",
        type=int,
        default=60,
        help="steps between held-out evaluations; 0: first and last only",
    )
    add("--eval-iters", type=int, default=4, help="global batches per held-out evaluation; 0: none")
    add(
        "--deterministic-mode",
        action=_Optional,
        default=None,
        help="deterministic algorithms only; unset: on a CPU",
    )


def _add_parallel(group: Any) -> None:
    add = group.add_argument
    add("--tensor-model-parallel-size", type=int, default=1, help="ranks that share each layer")
    add("--sequence-parallel", action="store_true", help="split norms and dropout along the sequence too")
    add("--pipeline-model-parallel-size", type=int, default=1, help="ranks that share the stack of layers")
    add(
        "--num-layers-per-virtual-pipeline-stage",
        type=int,
        default=None,
        help="interleaved pipeline: layers a chunk",
    )
    add(
        "--num-virtual-stages-per-pipeline-rank",
        type=int,
        default=None,
        help="interleaved pipeline: chunks a rank",
    )
    add(
        "--no-overlap-p2p-communication",
        action="store_false",
        dest="overlap_p2p_comm",
        help="interleaved pipeline without overlapped sends and receives",
    )
    add(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        type=int,
        default=None,
        dest="microbatch_group_size_per_vp_stage",
        help="microbatches that a chunk runs in a row",
    )
    add("--expert-model-parallel-size", type=int, default=1, help="ranks that share the experts")
    add(
        "--expert-tensor-parallel-size",
        type=int,
        default=None,
        help="ranks that share each expert; as attention",
    )
    add(
        "--use-distributed-optimizer",
        action="store_true",
        help="shard the optimizer over data parallel ranks",
    )
    add("--overlap-grad-reduce", action="store_true", help="reduce gradients during the backward pass")
    add("--overlap-param-gather", action="store_true", help="gather parameters during the forward pass")
    add(
        "--no-align-grad-reduce",
        action="store_false",
        dest="align_grad_reduce",
        help="stages reduce on their own",
    )
    add(
        "--no-align-param-gather",
        action="store_false",
        dest="align_param_gather",
        help="stages gather on their own",
    )
    add("--ddp-bucket-size", type=int, default=None, help="parameters per gradient bucket")
    add("--accumulate-allreduce-grads-in-fp32", action="store_true", help="implied by --bf16")
    add("--grad-reduce-in-bf16", action="store_true", help="keep and reduce gradients in bfloat16")
    add(
        "--overlap-moe-expert-parallel-comm",
        action="store_true",
        help="dispatch beside another microbatch's compute",
    )
    add("--delay-wgrad-compute", action="store_true", help="weight gradients after the dispatch")
    add("--distributed-backend", choices=("gloo", "nccl", "hccl"), default=None, help="unset: by device")
    add("--distributed-timeout-minutes", type=float, default=10, help="longest wait in a collective")


def _add_recompute(group: Any) -> None:
    add = group.add_argument
    add("--recompute-activations", action="store_true", help="short for --recompute-granularity selective")
    add(
        "--recompute-granularity",
        choices=("full", "selective"),
        default=None,
        help="layers, or parts of them",
    )
    add("--recompute-method", choices=("uniform", "block"), default=None, help="which layers, with full")
    add("--recompute-num-layers", type=int, default=None, help="how many layers, with full")
    add("--recompute-modules", nargs="+", default=None, help="which parts, with selective")


def _add_data(group: Any) -> None:
    add = group.add_argument
    add("--data", default=None, help="text file or folder; unset: the Python standard library's sources")
    add("--tokenizer-model", default=None, help="Hugging Face tokenizer.json; unset: bytes")
    add("--split", default="95,5", help="weights of training and held-out documents")
    add("--data-cache-path", default=None, help="folder of the indexed files; unset: OUTPUT_DIR/data-cache")


def _add_checkpoint(group: Any) -> None:
    add = group.add_argument
    add("--save", default=None, help="folder of the checkpoints; unset: checkpoints/ in the run's folder")
    add("--no-save", action="store_true", help="write no checkpoints")
    add("--save-interval", type=int, default=80, help="steps between checkpoints; 0: only at the end")
    add("--load", default=None, help="folder with checkpoints to start from")
    add("--ckpt-step", type=int, default=None, help="step to load; unset: the latest")
    add("--finetune", action="store_true", help="load weights only and start at step 0")
    add("--no-load-optim", action="store_true", help="do not load the optimizer")
    add("--no-load-rng", action="store_true", help="do not load the random number generators")
    add("--no-save-optim", action="store_true", help="do not save the optimizer")
    add("--no-save-rng", action="store_true", help="do not save the random number generators")


def _add_output(group: Any) -> None:
    add = group.add_argument
    add(
        "--output-dir",
        default="runs/pretrain_dsa",
        help="folder of the run; taken ones get a number, as in NAME-2",
    )
    add("--new-run", action="store_true", help="start anew even if the last run can be continued")
    add("--log-interval", type=int, default=10, help="steps between lines when there is no terminal")
    add("--no-tensorboard", action="store_true", help="write no TensorBoard files")
    add("--no-plot", action="store_true", help="draw no picture")
