"""``--cp-shard-vocabulary``: embedding and output weights divided among context parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.feature import Conflict, Feature, Flag, Requires
from mindspeed_dsa.megatron import across_layouts
from mindspeed_dsa.megatron.configuration import argument, hybrid_flag
from mindspeed_dsa.megatron.expert_parallel import check_refused
from mindspeed_dsa.patches.spec import Patch

FLAG = "--cp-shard-vocabulary"
_REFUSED = {
    "use_megatron_fsdp": "has buffers of its own",
    "use_custom_fsdp": "has buffers of its own",
    "data_parallel_random_init": "copies weights from one context parallel rank to the others",
    "overlap_param_gather_with_optimizer_step": "has an optimizer for each model chunk",
    "check_weight_hash_across_dp_replicas_interval": (
        "compares weights of context parallel ranks, which differ"
    ),
    "distrib_optim_fully_reshardable_mem_efficient": (
        "needs groups of gloo, which the optimizer of the vocabulary lacks"
    ),
    "hybrid_context_parallel": "gives the ranks different numbers of tokens",
    "optimizer_cpu_offload": "counts on one optimizer for all weights",
}
"""Megatron arguments that are refused when set, with the reason."""


def check_vocabulary(args: Any, options: None) -> Iterator[str]:
    """Yield problems with arguments that do not work with a divided vocabulary."""
    ranks = argument(args, "context_parallel_size") or 1
    if ranks == 1:
        yield (
            f"{FLAG} divides weights among context parallel ranks, and there is one; add "
            f"--context-parallel-size, or omit {FLAG}"
        )
        return
    yield from _check_divisible(args, ranks)
    yield from check_refused(args, FLAG, _REFUSED)
    if hybrid := hybrid_flag(args):
        yield f"{FLAG} divides the vocabulary of GPT models, and {hybrid} makes another; omit one of them"
    if argument(args, "ckpt_format") not in (None, "torch_dist"):
        yield (
            f"{FLAG}: --ckpt-format {argument(args, 'ckpt_format')} saves the part of one context parallel "
            "rank only; use torch_dist"
        )
    if argument(args, "fp16") and not argument(args, "loss_scale"):
        yield (
            f"{FLAG} cannot be used with --fp16 alone, which adapts a loss scale for each of the two "
            "optimizers; add --loss-scale, or use --bf16"
        )
    sharded = argument(args, "use_distributed_optimizer")
    if argument(args, "log_params_norm") and not sharded:
        yield (
            f"{FLAG}: --log-params-norm would count the part of one context parallel rank only; add "
            "--use-distributed-optimizer, or omit --log-params-norm"
        )
    if argument(args, "save_wgrads_interval") and sharded and argument(args, "overlap_grad_reduce"):
        yield (
            f"{FLAG}: --save-wgrads-interval would save parts of the vocabulary's gradients, which are "
            "reduced for one rank each; omit --overlap-grad-reduce or --save-wgrads-interval"
        )
    if argument(args, "optimizer") not in (None, "adam", "sgd"):
        yield f"{FLAG}: --optimizer {argument(args, 'optimizer')} is not supported; use adam or sgd"
    if (argument(args, "num_distributed_optimizer_instances") or 1) > 1:
        yield f"{FLAG} cannot be used with --num-distributed-optimizer-instances; omit one of them"


def _check_divisible(args: Any, ranks: int) -> Iterator[str]:
    entries = argument(args, "padded_vocab_size")
    tensor = argument(args, "tensor_model_parallel_size") or 1
    if entries and entries % (tensor * ranks):
        yield (
            f"{FLAG}: {entries} vocabulary entries cannot be divided among {tensor} tensor x {ranks} context "
            f"parallel ranks; set --make-vocab-size-divisible-by to a multiple of {ranks}"
        )


_HERE = "mindspeed_dsa.features.data_parallel.cp_vocabulary"
_VERSIONS = ">=0.16,<0.19"

FEATURE = Feature(
    name="cp-shard-vocabulary",
    summary="Divides the weights of embedding and output layer among context parallel ranks, with their "
    "gradients and optimizer state.",
    flags=(Flag(FLAG, "Divide embedding and output weights among context parallel ranks."),),
    patches=(
        Patch(
            "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
            "wrap",
            f"{_HERE}.layers:cut_vocabulary",
            "every context parallel rank has a copy of both weights",
            versions=_VERSIONS,
        ),
        Patch(
            "megatron.core.tensor_parallel.layers:VocabParallelEmbedding.forward",
            "wrap",
            f"{_HERE}.layers:look_up",
            "a context parallel rank looks up its own tokens only, and may not have their entries",
            params=("input_",),
            versions=_VERSIONS,
            priority=1,  # outside features that change how the original looks up
        ),
        Patch(
            "megatron.core.utils:make_tp_sharded_tensor_for_checkpoint",
            "wrap",
            f"{_HERE}.layers:place_part",
            "saves the weights of context parallel ranks as copies",
            params=("tensor",),
            versions=_VERSIONS,
        ),
        Patch(
            "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
            "wrap",
            f"{_HERE}.gradients:reduce_apart",
            "sums all gradients over context parallel ranks",
            params=("config", "ddp_config", "module", "pg_collection"),
            versions=_VERSIONS,
        ),
        Patch(
            "megatron.core.optimizer:get_megatron_optimizer",
            "wrap",
            f"{_HERE}.gradients:optimize_apart",
            "an optimizer has one data parallel group, and the divided weights have another",
            params=("config", "model_chunks", "use_gloo_process_groups", "pg_collection"),
            versions=_VERSIONS,
        ),
        Patch(
            "megatron.core.optimizer.optimizer:ChainedOptimizer.sharded_state_dict",
            "wrap",
            f"{_HERE}.gradients:save_apart",
            "numbers optimizers, so that the vocabulary's and the experts' may have one number",
            versions=_VERSIONS,
        ),
        *across_layouts.ROWS,
    ),
    requires=Requires(versions={"megatron-core": _VERSIONS}, features=("fused-linear-cross-entropy",)),
    conflicts=(
        Conflict("fsdp2", "FSDP2 already shards both weights over context parallel ranks; omit one of them"),
        Conflict(
            "dualpipev",
            "DualPipeV has embedding and output layer on one rank, and shares them itself; omit one of them",
        ),
    ),
    check=check_vocabulary,
    doc="cp-shard-vocabulary.md",
)
