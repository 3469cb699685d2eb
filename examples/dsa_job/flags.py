"""Table of the job's flags; names and meanings are Megatron's where Megatron has the flag."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Flag:
    """One row of the table.

    Attributes:
        default: default value, or the value's type for a flag that is unset by default.
        least: smallest value allowed.
        type: parser of the value, if the default's type cannot parse it.
        dest: attribute of the parsed arguments, if it differs from the flag's name.
        shape: whether a checkpoint fits only jobs with the same value.
        free: whether a run may continue with another value: it changes neither the model nor its data.
    """

    name: str
    default: Any
    help: str
    least: int | None = None
    choices: tuple[str, ...] | None = None
    type: Callable[[str], Any] | None = None
    nargs: str | None = None
    dest: str = ""
    shape: bool = False
    free: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dest", self.dest or self.name[2:].replace("-", "_"))

    def add_to(self, group: Any) -> None:
        """Add the flag to a parser or to a group of it."""
        unset = isinstance(self.default, type)
        kind = self.default if unset else type(self.default)
        options: dict[str, Any] = {"dest": self.dest, "help": self.help}
        options["default"] = None if unset else self.default
        if kind is bool:
            if self.default is False:
                options["action"] = "store_true"
            elif self.name.startswith("--no-"):
                options["action"] = "store_false"
            else:
                options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {"type": self.type or kind, "choices": self.choices, "nargs": self.nargs}
        group.add_argument(self.name, **options)


def layer_pattern(text: str) -> int | list[int]:
    """Parse ``2``, ``[0,1,1]`` or ``([0]*1+[1]*3)``, the formats of Megatron's ``--moe-layer-freq``."""

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
        return value(ast.parse(text.strip(), mode="eval").body)  # type: ignore[no-any-return]
    except (SyntaxError, ValueError, TypeError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number nor a list such as '([0]*1+[1]*3)'"
        ) from None


_IMPLEMENTATIONS = ("local", "transformer_engine")
_DISPATCHERS = ("allgather", "alltoall", "flex")
_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
_DECAY = ("constant", "linear", "cosine", "inverse-square-root")
_FREQ = "1 for a layer with experts, 0 for a dense one, as '([0]*1+[1]*3)'; unset: first layer dense"
_FUSED = "sparse attention on mindspeed_dsa's operators; --no-use-fused-dsa: on Megatron's own code"

GROUPS = {
    "model": (
        Flag("--num-layers", 4, "transformer layers", least=1, shape=True),
        Flag("--hidden-size", 128, "width of the residual stream", least=1, shape=True),
        Flag("--ffn-hidden-size", 384, "width of the dense layers' MLP", least=1, shape=True),
        Flag("--num-attention-heads", 4, "attention heads", least=1, shape=True),
        Flag("--seq-length", 256, "tokens per sequence", least=1),
        Flag("--max-position-embeddings", int, "longest position; the sequence length if unset"),
        Flag("--normalization", "RMSNorm", "kind of norm", choices=("RMSNorm", "LayerNorm"), shape=True),
        Flag("--norm-epsilon", 1e-6, "epsilon of the norms", dest="layernorm_epsilon"),
        Flag("--init-method-std", 0.02, "standard deviation of the initial weights"),
        Flag("--hidden-dropout", 0.0, "dropout on the residual branches", least=0),
        Flag("--attention-dropout", 0.0, "dropout on attention weights", least=0),
        Flag("--make-vocab-size-divisible-by", 128, "vocabulary is padded to a multiple of it", least=1),
        Flag("--untie-embeddings-and-output-weights", True, "separate output weights", shape=True),
        Flag("--mtp-num-layers", int, "multi-token prediction layers", shape=True),
        Flag("--mtp-loss-scaling-factor", 0.1, "weight of the multi-token prediction loss"),
        Flag("--transformer-impl", "local", "Megatron's own modules, or TE's", choices=_IMPLEMENTATIONS),
    ),
    "attention (MLA and DSA)": (
        Flag(
            "--experimental-attention-variant", "dsa", "none: dense MLA", choices=("dsa", "none"), shape=True
        ),
        # The library's own switch, which is off by default there; this job exists to run the library.
        Flag("--use-fused-dsa", True, _FUSED, free=True),
        Flag("--q-lora-rank", 64, "rank of the compressed query", least=1, shape=True),
        Flag("--kv-lora-rank", 64, "rank of the compressed key and value", least=1, shape=True),
        Flag("--qk-head-dim", 32, "query and key dimensions per head without position", least=1, shape=True),
        Flag("--qk-pos-emb-head-dim", 16, "query and key dimensions with position", least=1, shape=True),
        Flag("--v-head-dim", 32, "value dimensions per head", least=1, shape=True),
        Flag("--qk-layernorm", True, "norm on the compressed query and key-value", shape=True),
        Flag("--rope-type", "rope", "rotary embedding", choices=("rope", "yarn")),
        Flag("--rotary-base", 10000.0, "base of the rotary embedding"),
        Flag("--rotary-scaling-factor", 1.0, "YaRN: factor by which the context was extended"),
        Flag("--dsa-indexer-n-heads", 8, "heads of the indexer", least=1, shape=True),
        Flag("--dsa-indexer-head-dim", 32, "dimensions per head of the indexer", least=1, shape=True),
        Flag("--dsa-indexer-topk", 48, "keys that each query attends to", least=1),
        Flag("--dsa-indexer-loss-coeff", 0.01, "weight of the indexer's loss; 0: no such loss"),
        Flag("--dsa-indexer-use-sparse-loss", True, "indexer's loss over the selected keys only"),
    ),
    "mixture of experts": (
        Flag("--num-experts", 4, "experts per layer; 0: dense", least=0, dest="num_moe_experts", shape=True),
        Flag("--moe-layer-freq", list, _FREQ, type=layer_pattern, shape=True),
        Flag("--moe-ffn-hidden-size", 128, "width of each expert", shape=True),
        Flag("--moe-shared-expert-intermediate-size", 128, "width of the shared expert; 0: none", shape=True),
        Flag("--moe-router-topk", 2, "experts per token"),
        Flag("--moe-router-score-function", "sigmoid", "router's scores", choices=("softmax", "sigmoid")),
        Flag("--moe-router-pre-softmax", False, "softmax before the top-k choice"),
        Flag("--moe-router-topk-scaling-factor", float, "factor on the chosen scores"),
        Flag("--moe-router-num-groups", int, "groups of experts"),
        Flag("--moe-router-group-topk", int, "groups per token"),
        Flag("--moe-router-dtype", "fp32", "precision of the router", choices=("fp32", "fp64")),
        Flag("--moe-router-enable-expert-bias", True, "balance the load by a bias, not a loss", shape=True),
        Flag("--moe-router-bias-update-rate", 1e-3, "step of that bias"),
        Flag("--moe-router-load-balancing-type", "seq_aux_loss", "load-balancing loss", choices=_BALANCING),
        Flag("--moe-aux-loss-coeff", 1e-4, "weight of the balancing loss"),
        Flag("--moe-z-loss-coeff", float, "weight of the router's z-loss"),
        Flag("--moe-token-dispatcher-type", "alltoall", "how tokens reach experts", choices=_DISPATCHERS),
        Flag("--moe-grouped-gemm", False, "one grouped GEMM for all experts of a rank"),
        Flag("--moe-permute-fusion", False, "fused token permutation"),
        Flag("--moe-shared-expert-overlap", False, "run the shared expert during the dispatch"),
    ),
    "training": (
        Flag("--micro-batch-size", 4, "sequences per microbatch", least=1),
        Flag("--global-batch-size", 8, "sequences per step", least=1),
        Flag("--train-iters", 240, "steps; 0 only saves the initial weights", least=0),
        Flag("--exit-interval", int, "save and stop after a step divisible by this", least=1, free=True),
        Flag("--seed", 1234, "seed of weights, data order and dropout"),
        Flag("--bf16", False, "train in bfloat16 with float32 master weights"),
        Flag("--optimizer", "adam", "optimizer", choices=("adam", "sgd")),
        Flag("--lr", 3e-3, "highest learning rate", least=0),
        Flag("--min-lr", 3e-4, "lowest learning rate", least=0),
        Flag("--lr-decay-style", "cosine", "shape of the decay", choices=_DECAY),
        Flag("--lr-decay-iters", int, "steps of the decay; all steps if unset"),
        Flag("--lr-warmup-iters", int, "steps of linear warm-up; unset: a tenth of all, at most 10", least=0),
        Flag("--weight-decay", 0.1, "weight decay", least=0),
        Flag("--clip-grad", 1.0, "largest gradient norm; 0: no clipping", least=0),
        Flag("--adam-beta1", 0.9, "Adam's first moment"),
        Flag("--adam-beta2", 0.95, "Adam's second moment"),
        Flag("--adam-eps", 1e-8, "Adam's epsilon"),
        Flag("--sgd-momentum", 0.9, "momentum of SGD"),
        Flag("--calculate-per-token-loss", False, "one mean over all tokens of the batch"),
        Flag("--eval-interval", 60, "steps between held-out evaluations; 0: first and last only", least=0),
        Flag("--eval-iters", 4, "global batches per held-out evaluation; 0: none", least=0),
        Flag("--deterministic-mode", bool, "deterministic algorithms only; unset: on a CPU"),
    ),
    "parallelism": (
        Flag("--tensor-model-parallel-size", 1, "ranks that share each layer", least=1, free=True),
        Flag("--sequence-parallel", False, "split norms and dropout along the sequence too", free=True),
        Flag("--pipeline-model-parallel-size", 1, "ranks that share the layer stack", least=1, free=True),
        Flag(
            "--decoder-first-pipeline-num-layers",
            int,
            "layers of the first pipeline rank, where they are not as many as the others'",
            least=1,
            dest="num_layers_in_first_pipeline_stage",
            free=True,
        ),
        Flag(
            "--decoder-last-pipeline-num-layers",
            int,
            "layers of the last pipeline rank, likewise",
            least=1,
            dest="num_layers_in_last_pipeline_stage",
            free=True,
        ),
        Flag("--pipeline-model-parallel-layout", str, "layers of each model chunk, as Et|tt|ttL", free=True),
        Flag("--num-layers-per-virtual-pipeline-stage", int, "layers per model chunk", least=1, free=True),
        Flag("--num-virtual-stages-per-pipeline-rank", int, "model chunks per rank", least=1, free=True),
        Flag(
            "--no-overlap-p2p-communication", True, "no overlapped sends", dest="overlap_p2p_comm", free=True
        ),
        Flag(
            "--microbatch-group-size-per-virtual-pipeline-stage",
            int,
            "consecutive microbatches per model chunk",
            least=1,
            dest="microbatch_group_size_per_vp_stage",
            free=True,
        ),
        Flag("--context-parallel-size", 1, "ranks that share the rows of a sequence", least=1, free=True),
        Flag("--cp-comm-type", list, "how, for all layers or each of them", type=str, nargs="+", free=True),
        Flag("--hierarchical-context-parallel-sizes", list, "for a2a+p2p", type=int, nargs="+", free=True),
        Flag("--expert-model-parallel-size", 1, "ranks that share the experts", least=1, free=True),
        Flag("--expert-tensor-parallel-size", int, "ranks per expert; as attention", least=1, free=True),
        Flag("--use-distributed-optimizer", False, "shard the optimizer over data parallel ranks"),
        Flag(
            "--use-torch-fsdp2", False, "shard dense weights over data parallel ranks, with FSDP2", free=True
        ),
        Flag("--overlap-grad-reduce", False, "reduce gradients during the backward pass", free=True),
        Flag("--overlap-param-gather", False, "gather parameters during the forward pass", free=True),
        Flag("--no-align-grad-reduce", True, "stages reduce alone", dest="align_grad_reduce", free=True),
        Flag("--no-align-param-gather", True, "stages gather alone", dest="align_param_gather", free=True),
        Flag("--ddp-bucket-size", int, "parameters per gradient bucket", least=1, free=True),
        Flag("--accumulate-allreduce-grads-in-fp32", False, "implied by --bf16"),
        Flag("--grad-reduce-in-bf16", False, "keep and reduce gradients in bfloat16"),
        Flag("--overlap-moe-expert-parallel-comm", False, "dispatch during another microbatch's compute"),
        Flag("--delay-wgrad-compute", False, "weight gradients after the dispatch"),
        Flag("--distributed-backend", str, "unset: by device", choices=("gloo", "nccl", "hccl"), free=True),
        Flag("--distributed-timeout-minutes", 10.0, "longest wait in a collective", free=True),
    ),
    "recompute": (
        Flag("--recompute-activations", False, "short for --recompute-granularity selective"),
        Flag("--recompute-granularity", str, "layers, or parts of them", choices=("full", "selective")),
        Flag("--recompute-method", str, "which layers, with full", choices=("uniform", "block")),
        Flag("--recompute-num-layers", int, "how many layers, with full", least=1),
        Flag("--recompute-modules", str, "which parts, with selective", nargs="+"),
    ),
    "data": (
        Flag("--data", str, "text file or folder; unset: the Python standard library's sources"),
        Flag("--tokenizer-model", str, "Hugging Face tokenizer.json; unset: bytes"),
        Flag("--split", "95,5", "weights of training and held-out documents"),
        Flag("--data-cache-path", str, "indexed files; unset: OUTPUT_DIR/data-cache", free=True),
    ),
    "checkpoints": (
        Flag("--save", str, "folder of the checkpoints; unset: checkpoints/ in the run's folder"),
        Flag("--no-save", False, "write no checkpoints", free=True),
        Flag("--save-interval", 80, "steps between checkpoints; 0: only at the end", least=0, free=True),
        Flag("--no-async-save", True, "wait until it is written", dest="async_save", free=True),
        Flag("--load", str, "folder with checkpoints to start from"),
        Flag("--ckpt-step", int, "step to load; unset: the latest"),
        Flag("--finetune", False, "load weights only and start at step 0"),
        Flag("--no-load-optim", False, "do not load the optimizer"),
        Flag("--no-load-rng", False, "do not load the random number generators"),
        Flag("--no-save-optim", False, "do not save the optimizer"),
        Flag("--no-save-rng", False, "do not save the random number generators"),
    ),
    "output": (
        Flag("--output-dir", "runs/pretrain_dsa", "folder of the run; NAME-2 etc. if it is taken", free=True),
        Flag("--new-run", False, "start a new run even if the last one can be continued", free=True),
        Flag("--log-interval", 10, "steps between lines when there is no terminal", least=1, free=True),
        Flag("--no-tensorboard", False, "write no TensorBoard files", free=True),
        Flag("--no-plot", False, "draw no picture", free=True),
    ),
}
FLAGS = {flag.dest: flag for flags in GROUPS.values() for flag in flags}
"""All rows by ``dest``."""
LOSS = "use_fused_lightning_indexer_kl_loss"
FUSED_PARTS = {
    "use_dsa_absorb": "absorbed MLA",
    "use_fused_lightning_indexer": "Lightning Indexer",
    "use_fused_sparse_flash_attention": "Sparse Flash Attention",
    LOSS: "indexer loss",
}
"""Parts that ``--use-fused-dsa`` enables, unless their own switches disable them."""
