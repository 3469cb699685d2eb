"""``--use-torch-fsdp2`` repaired, beside expert and pipeline parallelism, and prefetched."""

from __future__ import annotations

from mindspeed_dsa.feature import Conflict, Feature, Flag, Requires
from mindspeed_dsa.features.data_parallel.fsdp2.options import Options
from mindspeed_dsa.features.data_parallel.fsdp2.validation import check_fsdp2, wanted
from mindspeed_dsa.megatron import across_layouts, configuration
from mindspeed_dsa.megatron.optimizer import FLOAT16, FLOAT32
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.features.data_parallel.fsdp2"
_WRAPPER = "megatron.core.distributed.torch_fully_sharded_data_parallel:TorchFullyShardedDataParallel"
_FINALIZE = "megatron.core.distributed.finalize_model_grads"
_UTILS = "megatron.core.utils"
_COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
_PLAN = "megatron.core.models.common.model_chunk_schedule_plan"
_WHOLE_LAYERS = "it runs parts of layers, and weights are gathered by whole layers; omit one of them"
_OWN_ORDER = "it runs layers again at times of its own, when their weights are not gathered; omit one of them"

FEATURE = Feature(
    name="fsdp2",
    summary="Shards dense weights, gradients and optimizer state with FSDP2, beside experts and pipelines, "
    "and repairs Megatron's own --use-torch-fsdp2.",
    flags=(
        Flag("--use-torch-fsdp2", "Megatron's own flag.", megatron=True),
        Flag(
            "--fsdp2-prefetch",
            "Units (layers, mostly) whose weights are gathered ahead of the one that computes; default 1.",
            kind="value",
            type=int,
            metavar="N",
        ),
        Flag(
            "--fsdp2-reduce-dtype",
            "Type of sums of gradients over ranks and microbatches; default fp32.",
            kind="value",
            choices=("fp32", "bf16"),
        ),
        Flag(
            "--fsdp2-sharding-size",
            "Neighbouring data parallel ranks that share one copy of the weights; default: all.",
            kind="value",
            type=int,
            metavar="N",
        ),
        Flag(
            "--fsdp2-config-path",
            "MindSpeed's YAML file with the same options and more; flags outrank it.",
            kind="value",
            metavar="FILE",
        ),
    ),
    patches=(
        Patch(
            f"{_WRAPPER}.__init__",
            "wrap",
            f"{_HERE}.wrapper:build",
            "it shards experts over ranks that have others, wraps parents first, and knows CUDA alone",
            params=("config", "ddp_config", "module", "process_group"),
        ),
        Patch(
            f"{_WRAPPER}.finish_grad_sync",
            "wrap",
            f"{_HERE}.wrapper:reduce_whole_gradients",
            "gradients of whole weights are reduced here; before 0.19 it lacks a parameter its caller sets",
        ),
        Patch(
            f"{_WRAPPER}.scale_gradients",
            "wrap",
            f"{_HERE}.wrapper:scale_all_gradients",
            "it does nothing, so that a loss per token would not be divided by the number of tokens",
            params=("scaling_factor",),
        ),
        Patch(
            f"{_WRAPPER}.zero_grad_buffer",
            "wrap",
            f"{_HERE}.wrapper:zero_whole_gradients",
            "gradients that are not sharded lie in buffers",
        ),
        Patch(
            f"{_WRAPPER}.load_state_dict",
            "wrap",
            f"{_HERE}.checkpoint:load_model",
            "it does nothing",
            params=("state_dict", "strict"),
        ),
        *(
            Patch(
                f"{optimizer}.load_state_dict",
                "wrap",
                f"{_HERE}.checkpoint:load_optimizer",
                "what is read from a checkpoint are plain tensors, and the optimizer works on sharded ones",
                params=("state_dict",),
                priority=-1,  # inside of features that say where state lies while it is loaded
            )
            for optimizer in (FLOAT16, FLOAT32)
        ),
        *(
            Patch(
                f"{optimizer}.sharded_state_dict",
                "wrap",
                f"{_HERE}.distributed_optimizer:in_its_format",
                "the distributed optimizer names masters and counts steps in other ways",
                params=("model_sharded_state_dict", "is_loading", "metadata"),
            )
            for optimizer in (FLOAT16, FLOAT32)
        ),
        Patch(
            "megatron.core.optimizer.optimizer:ChainedOptimizer.load_state_dict",
            "wrap",
            f"{_HERE}.distributed_optimizer:count_in_all",
            "a first stage without experts writes no count of their steps",
            params=("state_dict",),
            priority=1,  # outside of features that take states apart
        ),
        *across_layouts.ROWS,
        Patch(
            f"{FLOAT16}._collect_main_grad_data_for_unscaling",
            "wrap",
            f"{_HERE}.tensors:describe_whole_gradients",
            "one operator unscales all gradients, and takes sharded and plain ones only apart",
        ),
        Patch(
            f"{_UTILS}:to_local_if_dtensor",
            "replace",
            f"{_HERE}.tensors:to_local_if_dtensor",
            "to_local() is a new tensor each time in torch 2.13, and optimizers are saved by identity",
            params=("tensor",),
        ),
        Patch(
            f"{_UTILS}:get_data_parallel_group_if_dtensor",
            "replace",
            f"{_HERE}.tensors:shard_group_if_dtensor",
            "norms are summed over the ranks that share a replica; the original knows one replica alone",
            params=("tensor", "data_parallel_group"),
        ),
        Patch(
            f"{_UTILS}:make_tp_sharded_tensor_for_checkpoint",
            "wrap",
            f"{_HERE}.checkpoint:place_shard",
            "it takes every shard for one of the first dimension",
            params=("tensor", "key", "replica_id"),
        ),
        Patch(
            f"{_UTILS}:make_sharded_tensor_for_checkpoint",
            "wrap",
            f"{_HERE}.checkpoint:place_shard",
            "it takes every shard for one of the first dimension",
            params=("tensor", "key", "replica_id"),
        ),
        Patch(
            "megatron.core.transformer.mlp:apply_swiglu_sharded_factory",
            "wrap",
            f"{_HERE}.checkpoint:place_gated_shard",
            "a shard of stacked gate and up projections is not half of each",
            params=("original_sh_ten", "sharded_offsets"),
        ),
        Patch(
            f"{_FINALIZE}:_unshard_if_dtensor",
            "replace",
            f"{_HERE}.tensors:to_local_if_dtensor",
            "tensor parallel ranks have the same piece of a gradient, which can be reduced as it is",
            params=("tensor",),
        ),
        Patch(
            f"{_FINALIZE}:_reshard_if_dtensor",
            "replace",
            f"{_HERE}.tensors:gradient_in_place",
            "the piece has been reduced in place",
            params=("tensor_to_shard", "reference_tensor"),
        ),
        Patch(
            f"{_COLLECTIVES}:foreach_all_gather_copy_out",
            "wrap",
            "mindspeed_dsa.parallel.fsdp2_copy_out:in_one_pass",
            "it copies a weight once more that is not cut on its first dimension",
            params=("all_gather_result", "fsdp_params", "group"),
        ),
        Patch(
            f"{_PLAN}:TransformerLayerSchedulePlan.run",
            "wrap",
            f"{_HERE}.schedule:run_layers",
            "it runs parts of layers, whose weights hooks of whole layers gather",
            params=("f_layer", "b_layer", "f_input", "b_grad", "is_last_layer_in_bwd"),
            priority=1,  # outside of features that run these parts in another order
        ),
        Patch(
            f"{_PLAN}:TransformerModelChunkSchedulePlan.run",
            "wrap",
            f"{_HERE}.schedule:run_chunks",
            "the end of each part's backward is not that of the model's",
            params=("f_schedule_plan", "b_schedule_plan", "b_grad", "post_backward"),
        ),
        Patch(
            "megatron.training.arguments:validate_args",
            "wrap",
            f"{_HERE}.arguments:validate_beside_experts_and_pipelines",
            "it refuses pipeline and expert parallelism",
            params=("args",),
            required=False,
            priority=-1,
        ),
        Patch(
            "megatron.training.checkpointing:load_checkpoint",
            "wrap",
            f"{_HERE}.arguments:load_everything",
            "it leaves out the optimizer's own state dict, and with it the number of steps done",
            required=False,
        ),
        Patch(
            "megatron.training.checkpointing:_build_sharded_state_dict_metadata",
            "wrap",
            f"{_HERE}.distributed_optimizer:say_format",
            "the distributed optimizer reads a checkpoint by the format that it names",
            params=("args",),
            required=False,
        ),
    ),
    requires=Requires(versions={"megatron-core": ">=0.16,<0.21", "torch": ">=2.10"}),
    conflicts=(
        Conflict("moe-batch-overlap", _WHOLE_LAYERS),
        Conflict("recompute-ahead", _OWN_ORDER),
        Conflict(
            "reuse-fp32-param",
            "weights are gathered from their bf16 halves, which it takes away; use --swap-optimizer, which "
            "saves more",
        ),
    ),
    active=wanted,
    options=Options.of,
    validate=configuration.validate(check_fsdp2, Options.of),
    doc="fsdp2.md",
)
FEATURES = (FEATURE,)
