"""bfloat16 weights and float32 master weights in one storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_dsa.declarations import Feature, Flag, Requires
from mindspeed_dsa.features.memory.combinations import refused, unknown_optimizer
from mindspeed_dsa.patches.spec import Patch

_IMPL = "mindspeed_dsa.features.memory.reuse_fp32_param_impl"
_MIXED = "megatron.core.optimizer.optimizer:MixedPrecisionOptimizer"
_FLOAT16 = "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"

_REFUSED: tuple[tuple[str, str, str], ...] = (
    # argument, why not, what to do
    ("fp16", "the trick needs bfloat16, which is the upper half of a float32; float16 is not", "use --bf16"),
    (
        "use_precision_aware_optimizer",
        "it keeps the master weights itself (with store_param_remainders as remainders, too)",
        "choose one of the two",
    ),
    ("optimizer_cpu_offload", "it moves the master weights to the host", "choose one of the two"),
    ("fp8", "weights in fp8 are not the upper halves of the master weights", "leave out --fp8-format"),
    ("fp4", "weights in fp4 are not the upper halves of the master weights", "leave out --fp4-format"),
    ("use_megatron_fsdp", "it shards the weights by itself", "use --use-distributed-optimizer alone"),
    ("use_torch_fsdp2", "it shards the weights by itself", "use --use-distributed-optimizer alone"),
    (
        "nccl_ub",
        "weights move to a storage that is not registered with NCCL",
        "leave out --use-nccl-ub",
    ),
    ("qk_clip", "it changes the master weights between steps, when there are none", "leave out --qk-clip"),
    (
        "log_params_norm",
        "it reads the master weights between steps, when there are none",
        "leave out --log-params-norm",
    ),
    (
        "rl_offload_optimizer_during_inference",
        "it moves weights to the host without their lower halves",
        "leave out --rl-offload-optimizer-during-inference",
    ),
)
_OPTIMIZERS = ("adam", "sgd")


def problems(args: Any) -> Sequence[str]:
    """What in Megatron's arguments does not go together with the feature."""
    found = refused("--reuse-fp32-param", args, _REFUSED)
    # A namespace without bf16 is not Megatron's; the optimizer is checked again when it is built.
    if hasattr(args, "bf16") and not args.bf16 and not getattr(args, "fp16", False):
        found.append(
            "--reuse-fp32-param: weights are float32, so there are no two copies to put in one storage; "
            "add --bf16 or leave the flag out"
        )
    why = "is not known to leave the master weights alone outside of its step"
    return found + unknown_optimizer("--reuse-fp32-param", args, _OPTIMIZERS, why)


FEATURE = Feature(
    name="reuse-fp32-param",
    summary="Keeps bfloat16 weights and float32 master weights in one storage, exactly.",
    flags=(
        Flag(
            "--reuse-fp32-param",
            "Keep bfloat16 weights and float32 master weights in one storage: 2 bytes a parameter less, "
            "2/DP with the distributed optimizer.",
        ),
    ),
    patches=(
        Patch(
            f"{_FLOAT16}.__init__",
            "wrap",
            f"{_IMPL}:with_shared_storage",
            "model weights move into the storage of the master weights",
            params=("optimizer", "config"),
        ),
        Patch(
            f"{_DISTRIBUTED}.__init__",
            "wrap",
            f"{_IMPL}:with_shared_buckets",
            "master weights of the own shard lie over the bucket during a step",
            params=("optimizer", "config"),
        ),
        Patch(
            f"{_MIXED}.step_with_ready_grads",
            "wrap",
            f"{_IMPL}:with_master_weights",
            "float32 weights are there for the step, which a skipped step never reaches",
        ),
        Patch(
            f"{_MIXED}.prepare_grads",
            "wrap",
            f"{_IMPL}:after_whole_steps",
            "after a step that failed in the middle, no part of a chain of optimizers makes its step",
        ),
        *(
            Patch(
                f"{optimizer}._copy_main_params_to_model_params",
                "wrap",
                f"{_IMPL}:by_rounding_in_place",
                "the bfloat16 weights are made in the storage of the master weights",
            )
            for optimizer in (_FLOAT16, _DISTRIBUTED)
        ),
        *(
            Patch(
                f"{optimizer}._copy_model_params_to_main_params",
                "wrap",
                f"{_IMPL}:by_dropping_lower_halves",
                "master weights are set from the model's, or from a state dict",
                params=("state_dict",),
            )
            for optimizer in (_FLOAT16, _DISTRIBUTED)
        ),
        Patch(
            f"{_FLOAT16}.state_dict",
            "wrap",
            f"{_IMPL}:with_float32_copies",
            "checkpoints hold ordinary float32 weights",
        ),
        Patch(
            f"{_FLOAT16}.load_state_dict",
            "wrap",
            f"{_IMPL}:into_master_weights",
            "ordinary float32 weights are read from a checkpoint",
            params=("state_dict",),
        ),
        Patch(
            f"{_DISTRIBUTED}._get_main_param_and_optimizer_states",
            "wrap",
            f"{_IMPL}:with_float32_copy",
            "checkpoints hold ordinary float32 weights",
            params=("model_param",),
        ),
        Patch(
            f"{_DISTRIBUTED}._set_main_param_and_optimizer_states",
            "wrap",
            f"{_IMPL}:into_shard",
            "ordinary float32 weights are read from a checkpoint",
            params=("model_param", "tensors"),
        ),
        Patch(
            f"{_DISTRIBUTED}.load_parameter_state_from_dp_zero_legacy",
            "wrap",
            f"{_IMPL}:into_all_shards",
            "old checkpoints are copied into the master weights",
            params=("state_dict",),
        ),
    ),
    requires=Requires(versions={"megatron-core": ">=0.16,<0.17"}),
    validate=problems,
    doc="reuse-fp32-param.md",
)
FEATURES = (FEATURE,)
