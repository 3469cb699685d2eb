"""Declaration of fsdp2: fixes for ``--use-torch-fsdp2``, and support for experts, pipelines and prefetch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_dsa.feature import Conflict, Feature, Flag, Requires
from mindspeed_dsa.features.data_parallel.fsdp2.config_file import read_config
from mindspeed_dsa.megatron import across_layouts
from mindspeed_dsa.megatron.configuration import argument, cuts_weights_further, hybrid_flag
from mindspeed_dsa.megatron.graphs import refuse_graphs
from mindspeed_dsa.megatron.low_precision import check_stored
from mindspeed_dsa.megatron.optimizer import FLOAT16, FLOAT32
from mindspeed_dsa.patches.spec import Patch


@dataclass(frozen=True)
class Options:
    """Options of ``--use-torch-fsdp2``.

    Attributes:
        prefetch: number of FSDP units whose weights are gathered in advance, while another unit runs.
        reduce_dtype: dtype of gradient sums, ``fp32`` or ``bf16``.
        param_dtype: weights' dtype in the file of ``--fsdp2-config-path``, ``fp32`` or ``bf16``; ``None`` if
            not set there.
        sharding_size: number of data parallel ranks that share one copy of the weights; ``None``: all.
        reshard: FSDP2's ``reshard_after_forward``: whether to free gathered weights after forward, or number
            of ranks to reshard to. ``None``: Megatron's setting.
        wrapped: module classes to wrap as FSDP units in addition to the default ones,
            ``"package.module.Class"``.
        ignored: classes of modules whose weights are not sharded.
        experts: whether to shard experts too, over the ranks with the same experts.
    """

    prefetch: int = 1
    reduce_dtype: str = "fp32"
    param_dtype: str | None = None
    sharding_size: int | None = None
    reshard: bool | int | None = None
    wrapped: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    experts: bool = False

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Build the options from resolved settings or from parsed arguments; flags override the file."""
        path = getattr(settings, "fsdp2_config_path", None)
        values = read_config(path) if path else {}
        for name in ("prefetch", "reduce_dtype", "sharding_size"):
            if (value := getattr(settings, f"fsdp2_{name}", None)) is not None:
                values[name] = value
        return cls(**values, experts=bool(getattr(settings, "fsdp2_shard_experts", False)))


FLAG = "--use-torch-fsdp2"
EXPERTS = "--fsdp2-shard-experts"
_OWN = (
    "fsdp2_prefetch",
    "fsdp2_reduce_dtype",
    "fsdp2_config_path",
    "fsdp2_sharding_size",
    "fsdp2_shard_experts",
)
_REFUSED = {
    "use_megatron_fsdp": "both shard the weights; choose one",
    "use_distributed_optimizer": "its state is sharded with the weights; omit --use-distributed-optimizer",
    "gradient_accumulation_fusion": (
        "gradients leave in the moment they are complete; add --no-gradient-accumulation-fusion"
    ),
    "fp16": "Megatron's loss scaling does not see its gradients; use --bf16",
    "optimizer_cpu_offload": "it moves whole parameters' state to the host; omit one of them",
    "use_precision_aware_optimizer": "it needs the distributed optimizer; omit it",
    "data_parallel_random_init": "ranks would shard different weights; omit --data-parallel-random-init",
    "init_model_with_meta_device": "experts need their memory from the start; omit it",
    "check_weight_hash_across_dp_replicas_interval": "ranks have no equal weights to compare; omit it",
    "mtp_detach_heads": "Megatron reads the output layer's weight outside of the layer; omit it",
    "delay_wgrad_compute": (
        "Megatron leaves delayed weight gradients with Transformer Engine's layers, which know no shards; "
        "omit --delay-wgrad-compute: --moe-fb-overlap delays those of attention here"
    ),
}


def wanted(settings: Any) -> bool:
    """Return whether ``--use-torch-fsdp2`` or an option of it is set.

    Options without the flag are errors, which ``check_fsdp2`` reports.
    """
    return bool(getattr(settings, "use_torch_fsdp2", False)) or any(
        _is_given(settings, name) for name in _OWN
    )


def _is_given(settings: Any, name: str) -> bool:
    value = getattr(settings, name, None)
    return value is not None and value is not False


def check_fsdp2(args: Any, options: Options) -> Iterator[str]:
    """Yield arguments that conflict with ``--use-torch-fsdp2``."""
    if not argument(args, "use_torch_fsdp2"):
        for name in _OWN:
            if _is_given(args, name):
                yield f"--{name.replace('_', '-')} has no effect without {FLAG}; add that or drop it"
        return
    for name, why in _REFUSED.items():
        if argument(args, name):
            yield f"{FLAG} does not combine with {name}: {why}"
    if hybrid := hybrid_flag(args):
        yield (
            f"{FLAG} does not combine with {hybrid}: checkpoints of Mamba layers cut weights their own "
            "way; omit one of them"
        )
    yield from check_stored(args, FLAG, "it gathers weights without the scales that belong to such weights")
    if argument(args, "untie_embeddings_and_output_weights") is False:
        yield f"{FLAG}: units share no weights; add --untie-embeddings-and-output-weights"
    if (format := argument(args, "ckpt_format")) not in (None, "torch_dist"):
        # Megatron saves torch_dcp, and calls ChainedOptimizer.state_dict with an unknown argument to load it.
        why = "no job could load its checkpoints" if format == "torch_dcp" else "it does not save shards"
        yield f"{FLAG} does not combine with --ckpt-format {format}: {why}; use torch_dist"
    yield from _check_experts(args, options)
    yield from refuse_graphs(
        args, FLAG, "graphs read weights where they lay when captured, and gathers move them"
    )
    if (argument(args, "experimental_attention_variant") or "dsa") not in ("dsa", "none"):
        yield f"{FLAG}: checkpoints of linear attention cut weights in ways of their own; omit {FLAG}"
    if argument(args, "optimizer") not in (None, "adam", "sgd"):
        yield f"{FLAG}: --optimizer {argument(args, 'optimizer')} is not tried on shards; use adam or sgd"
    if cuts_weights_further(args):
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


def _check_experts(args: Any, options: Options) -> Iterator[str]:
    if not options.experts:
        return
    if getattr(args, "num_experts", 1) in (None, 0):
        yield f"{EXPERTS}: this model has no experts; drop the flag"
    if argument(args, "log_params_norm") and (argument(args, "expert_model_parallel_size") or 1) > 1:
        yield (
            f"{EXPERTS}: --log-params-norm would count one rank's shards of experts only; omit it, or drop "
            f"{EXPERTS}"
        )
    if argument(args, "transformer_impl") not in (None, "local"):
        yield (
            f"{EXPERTS}: Transformer Engine's experts have their places in checkpoints by rank alone; use "
            f"--transformer-impl local, or drop {EXPERTS}"
        )
    if options.reshard not in (None, True, False):
        yield (
            f"{EXPERTS}: --fsdp2-config-path says reshard_after_forward: {options.reshard}, a number of "
            "ranks that share dense weights, and experts have others; write true or false"
        )
    tensor = argument(args, "tensor_model_parallel_size") or 1
    whole = argument(args, "expert_tensor_parallel_size") not in (None, tensor)
    if whole and (argument(args, "expert_model_parallel_size") or 1) == 1:
        yield (
            f"{EXPERTS}: without expert parallelism Megatron takes experts for dense weights, which "
            f"--expert-tensor-parallel-size {argument(args, 'expert_tensor_parallel_size')} makes other "
            f"ranks' than tensor parallel size {tensor} does; omit it, or use --moe-tp-extend-ep"
        )


def check_sharding_size(size: int, ranks: int) -> Iterator[str]:
    """Yield an error if ``size`` is below 2 or does not divide ``ranks``.

    Args:
        size: number of ranks that share one copy of the weights.
        ranks: number of data and context parallel ranks together.
    """
    if size < 2 or ranks % size:
        yield (
            f"--fsdp2-sharding-size {size} must be 2 or more and divide the {ranks} ranks of data and "
            "context parallelism; choose such a number, or omit it to share among all of them"
        )


_HERE = "mindspeed_dsa.features.data_parallel.fsdp2"
_WRAPPER = "megatron.core.distributed.torch_fully_sharded_data_parallel:TorchFullyShardedDataParallel"
_FINALIZE = "megatron.core.distributed.finalize_model_grads"
_UTILS = "megatron.core.utils"
_COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
_PLAN = "megatron.core.models.common.model_chunk_schedule_plan"

FEATURE = Feature(
    name="fsdp2",
    summary="Shards weights, gradients and optimizer state with FSDP2, of experts where they are asked for, "
    "beside pipelines, and repairs Megatron's own --use-torch-fsdp2.",
    overlaps="gathers of weights and reductions of gradients",
    flags=(
        Flag("--use-torch-fsdp2", "Megatron's own flag.", megatron=True),
        Flag(
            "--fsdp2-prefetch",
            "Number of units (usually layers) whose weights are gathered before they are needed; default 1.",
            kind="value",
            type=int,
            metavar="N",
        ),
        Flag(
            "--fsdp2-reduce-dtype",
            "Data type in which gradients are summed over ranks and microbatches; default fp32.",
            kind="value",
            choices=("fp32", "bf16"),
        ),
        Flag(
            "--fsdp2-sharding-size",
            "Number of neighbouring data parallel ranks over which the weights are sharded; default: all.",
            kind="value",
            type=int,
            metavar="N",
        ),
        Flag(
            EXPERTS,
            "Also shard experts, over the ranks that have the same experts (expert data parallel ranks).",
        ),
        Flag(
            "--fsdp2-config-path",
            "YAML file of MindSpeed with FSDP2 options; flags take precedence over it.",
            kind="value",
            metavar="FILE",
        ),
    ),
    patches=(
        Patch(
            f"{_WRAPPER}.__init__",
            "wrap",
            f"{_HERE}.wrapper:build",
            "Megatron shards experts over the wrong ranks, wraps parents before children, and supports "
            "CUDA only",
            params=("config", "ddp_config", "module", "process_group"),
        ),
        Patch(
            f"{_WRAPPER}.finish_grad_sync",
            "wrap",
            f"{_HERE}.wrapper:reduce_whole_gradients",
            "reduces gradients of whole weights; before 0.19 Megatron's lacks a parameter its caller sets",
        ),
        Patch(
            f"{_WRAPPER}.scale_gradients",
            "wrap",
            f"{_HERE}.wrapper:scale_all_gradients",
            "Megatron's does nothing, so that a loss per token would not be divided by the number of tokens",
            params=("scaling_factor",),
        ),
        Patch(
            f"{_WRAPPER}.zero_grad_buffer",
            "wrap",
            f"{_HERE}.wrapper:zero_whole_gradients",
            "clears the buffers of gradients that are not sharded",
        ),
        Patch(
            f"{_WRAPPER}.load_state_dict",
            "wrap",
            f"{_HERE}.checkpoint:load_model",
            "loads the model's weights, for which Megatron's wrapper does nothing",
            params=("state_dict", "strict"),
        ),
        *(
            Patch(
                f"{optimizer}.load_state_dict",
                "wrap",
                f"{_HERE}.checkpoint:load_optimizer",
                "turns the plain tensors of a checkpoint into shards, which the optimizer works on",
                params=("state_dict",),
                priority=-1,  # inside features that move state while it is loaded
            )
            for optimizer in (FLOAT16, FLOAT32)
        ),
        *(
            Patch(
                f"{optimizer}.sharded_state_dict",
                "wrap",
                f"{_HERE}.checkpoint:in_its_format",
                "saves master weights and steps as the distributed optimizer names and counts them",
                params=("model_sharded_state_dict", "is_loading", "metadata"),
            )
            for optimizer in (FLOAT16, FLOAT32)
        ),
        Patch(
            "megatron.core.optimizer.optimizer:ChainedOptimizer.load_state_dict",
            "wrap",
            f"{_HERE}.checkpoint:count_in_all",
            "restores the count of experts' steps, which a first stage without experts does not write",
            params=("state_dict",),
            priority=1,  # outside features that split states
        ),
        *across_layouts.ROWS,
        Patch(
            f"{FLOAT16}._collect_main_grad_data_for_unscaling",
            "wrap",
            f"{_HERE}.wrapper:describe_whole_gradients",
            "makes whole gradients DTensors: one operator unscales all gradients and does not mix kinds",
        ),
        Patch(
            f"{_UTILS}:to_local_if_dtensor",
            "replace",
            f"{_HERE}.wrapper:to_local_if_dtensor",
            "returns one local tensor, where to_local() makes new ones: optimizers are saved by identity",
            params=("tensor",),
        ),
        Patch(
            f"{_UTILS}:get_data_parallel_group_if_dtensor",
            "replace",
            f"{_HERE}.wrapper:shard_group_if_dtensor",
            "sums norms over the ranks that share a replica, where Megatron knows one replica alone",
            params=("tensor", "data_parallel_group"),
        ),
        Patch(
            f"{_UTILS}:make_tp_sharded_tensor_for_checkpoint",
            "wrap",
            f"{_HERE}.checkpoint:place_shard",
            "places shards of any dimension in a checkpoint, where Megatron takes all for the first",
            params=("tensor", "key", "replica_id"),
        ),
        Patch(
            f"{_UTILS}:make_sharded_tensor_for_checkpoint",
            "wrap",
            f"{_HERE}.checkpoint:place_shard",
            "places shards of any dimension in a checkpoint, where Megatron takes all for the first",
            params=("tensor", "key", "replica_id"),
        ),
        Patch(
            "megatron.core.transformer.mlp:apply_swiglu_sharded_factory",
            "wrap",
            f"{_HERE}.checkpoint:place_gated_shard",
            "places shards of stacked gate and up projections, which are not half of each",
            params=("original_sh_ten", "sharded_offsets"),
        ),
        Patch(
            "megatron.core.transformer.moe.experts:SequentialMLP.sharded_state_dict",
            "wrap",
            f"{_HERE}.checkpoint:place_expert_shards",
            "saves every rank's shard of an expert, where Megatron takes all but one for copies",
            params=("prefix", "sharded_offsets", "metadata"),
        ),
        Patch(
            f"{_FINALIZE}:_unshard_if_dtensor",
            "replace",
            f"{_HERE}.wrapper:to_local_if_dtensor",
            "reduces this rank's shard of a gradient as it is: tensor parallel ranks have the same one",
            params=("tensor",),
        ),
        Patch(
            f"{_FINALIZE}:_reshard_if_dtensor",
            "replace",
            f"{_HERE}.wrapper:gradient_in_place",
            "returns the gradient, whose shard has been reduced in place",
            params=("tensor_to_shard", "reference_tensor"),
        ),
        Patch(
            f"{_COLLECTIVES}:foreach_all_gather_copy_out",
            "wrap",
            "mindspeed_dsa.features.data_parallel.fsdp2.copy_out:in_one_pass",
            "copies each weight once, where FSDP2 copies those not cut on their first dimension twice",
            params=("all_gather_result", "fsdp_params", "group"),
        ),
        Patch(
            f"{_PLAN}:TransformerLayerSchedulePlan.run",
            "wrap",
            f"{_HERE}.pairs:run_layers",
            "gathers the weights of layers that a schedule runs in parts, which FSDP2's hooks never see",
            params=("f_layer", "b_layer", "f_input", "b_grad", "is_last_layer_in_bwd"),
            priority=1,  # outside features that reorder these parts
        ),
        Patch(
            f"{_PLAN}:TransformerModelChunkSchedulePlan.run",
            "wrap",
            f"{_HERE}.pairs:run_chunks",
            "ends a backward with the model's, where FSDP2 would end it with each part's",
            params=("f_schedule_plan", "b_schedule_plan", "b_grad", "post_backward"),
        ),
        Patch(
            "megatron.training.arguments:validate_args",
            "wrap",
            f"{_HERE}.wrapper:validate_beside_experts_and_pipelines",
            "lets FSDP2 pass beside pipeline and expert parallelism, which Megatron refuses",
            params=("args",),
            required=False,
            priority=-1,
        ),
        Patch(
            "megatron.training.checkpointing:load_checkpoint",
            "wrap",
            f"{_HERE}.checkpoint:load_everything",
            "loads the optimizer's own state dict, which Megatron leaves out with the number of steps done",
            required=False,
        ),
        Patch(
            "megatron.training.checkpointing:_build_sharded_state_dict_metadata",
            "wrap",
            f"{_HERE}.checkpoint:say_format",
            "names the checkpoint's format, by which the distributed optimizer reads it",
            params=("args",),
            required=False,
        ),
    ),
    requires=Requires(versions={"megatron-core": ">=0.16,<0.21", "torch": ">=2.10"}),
    conflicts=(
        Conflict(
            "reuse-fp32-param",
            "weights are gathered from their bf16 halves, which it takes away; use --swap-optimizer, which "
            "saves more",
        ),
    ),
    active=wanted,
    options=Options.of,
    check=check_fsdp2,
    doc="fsdp2.md",
)
