"""What FSDP2 does not combine with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.features.data_parallel.fsdp2.options import Options
from mindspeed_dsa.megatron.configuration import argument

FLAG = "--use-torch-fsdp2"
_OWN = ("fsdp2_prefetch", "fsdp2_reduce_dtype", "fsdp2_config_path", "fsdp2_sharding_size")
_GRAPHS = "graphs read weights where they lay when recorded, and gathers move them; omit it"
_MAMBA = "checkpoints of Mamba layers cut weights in ways of their own; omit one of them"
_REFUSED = {
    "use_megatron_fsdp": "both shard the weights; choose one",
    "use_distributed_optimizer": "its state is sharded with the weights; omit --use-distributed-optimizer",
    "gradient_accumulation_fusion": (
        "gradients leave in the moment they are complete; add --no-gradient-accumulation-fusion"
    ),
    "fp16": "Megatron's loss scaling does not see its gradients; use --bf16",
    "fp8": "weights in fp8 are made from others than shards; omit --fp8-format",
    "fp4": "weights in fp4 are made from others than shards; omit --fp4-format",
    "optimizer_cpu_offload": "it moves whole parameters' state to the host; omit one of them",
    "use_precision_aware_optimizer": "it needs the distributed optimizer; omit it",
    "data_parallel_random_init": "ranks would shard different weights; omit --data-parallel-random-init",
    "init_model_with_meta_device": "experts need their memory from the start; omit it",
    "check_weight_hash_across_dp_replicas_interval": "ranks have no equal weights to compare; omit it",
    "delay_wgrad_compute": (
        "Megatron leaves delayed weight gradients with Transformer Engine's layers, which know no shards; "
        "omit --delay-wgrad-compute: --moe-fb-overlap delays those of attention here"
    ),
    "is_hybrid_model": _MAMBA,
    "hybrid_layer_pattern": _MAMBA,
    "enable_cuda_graph": _GRAPHS,
    "external_cuda_graph": _GRAPHS,
}


def wanted(settings: Any) -> bool:
    """On with Megatron's flag; with an option of ours alone it is refused by :func:`check_fsdp2`."""
    return bool(getattr(settings, "use_torch_fsdp2", False)) or any(
        getattr(settings, name, None) is not None for name in _OWN
    )


def check_fsdp2(args: Any, options: Options) -> Iterator[str]:
    """What in a job's arguments does not combine with it."""
    if not argument(args, "use_torch_fsdp2"):
        for name in _OWN:
            if argument(args, name) is not None:
                yield f"--{name.replace('_', '-')} has no effect without {FLAG}; add that or drop it"
        return
    for name, why in _REFUSED.items():
        if argument(args, name):
            yield f"{FLAG} does not combine with {name}: {why}"
    if argument(args, "untie_embeddings_and_output_weights") is False:
        yield f"{FLAG}: units share no weights; add --untie-embeddings-and-output-weights"
    if argument(args, "ckpt_format") not in (None, "torch_dist", "torch_dcp"):
        yield f"{FLAG}: shards are saved with --ckpt-format torch_dist or torch_dcp alone; use torch_dist"
    yield from _check_parallel_checkpoints(args)
    if (argument(args, "cuda_graph_impl") or "none") != "none":
        yield f"{FLAG} does not combine with cuda_graph_impl: {_GRAPHS}"
    if (argument(args, "experimental_attention_variant") or "dsa") not in ("dsa", "none"):
        yield f"{FLAG}: checkpoints of linear attention cut weights in ways of their own; omit {FLAG}"
    if argument(args, "optimizer") not in (None, "adam", "sgd"):
        yield f"{FLAG}: --optimizer {argument(args, 'optimizer')} is not tried on shards; use adam or sgd"
    tensor = argument(args, "tensor_model_parallel_size") or 1
    if (argument(args, "tensor_parallel_num_weight_shards") or tensor) > tensor:
        yield f"{FLAG} and --tensor-parallel-num-weight-shards both shard weights; choose one"
    if (argument(args, "num_distributed_optimizer_instances") or 1) > 1:
        yield f"{FLAG}: use --fsdp2-sharding-size in place of --num-distributed-optimizer-instances"
    weights = None if argument(args, "bf16") is None else "bf16" if argument(args, "bf16") else "fp32"
    if None not in (options.param_dtype, weights) and options.param_dtype != weights:
        yield (
            f"--fsdp2-config-path: param_dtype is {options.param_dtype} and the job's weights are {weights}; "
            "add or drop --bf16, or omit the key"
        )
    if options.prefetch < 0:
        yield f"--fsdp2-prefetch is {options.prefetch}; it must be 0 or more"
    ranks = argument(args, "data_parallel_size")
    if ranks and options.sharding_size is not None:
        yield from check_sharding_size(
            options.sharding_size, ranks * (argument(args, "context_parallel_size") or 1)
        )


def _check_parallel_checkpoints(args: Any) -> Iterator[str]:
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    alone = all((argument(args, name) or 1) == 1 for name in sizes)
    if argument(args, "ckpt_format") == "torch_dcp" and not alone:
        yield (
            f"{FLAG}: --ckpt-format torch_dcp takes weights of tensor, pipeline and expert parallel "
            "ranks for copies of one; use torch_dist"
        )


def check_sharding_size(size: int, ranks: int) -> Iterator[str]:
    """A problem where replicas would be of different sizes, or none would be shared.

    Args:
        size: ranks that share one copy of the weights.
        ranks: of data and context parallelism together.
    """
    if size < 2 or ranks % size:
        yield (
            f"--fsdp2-sharding-size {size} must be 2 or more and divide the {ranks} ranks of data and "
            "context parallelism; choose such a number, or omit it to share among all of them"
        )
