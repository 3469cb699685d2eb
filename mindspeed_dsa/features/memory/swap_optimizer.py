"""Optimizer state on the host; the step is a pipeline of loading, updating and storing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_dsa.declarations import Conflict, Feature, Flag, Requires
from mindspeed_dsa.features.memory.combinations import (
    LOADED_INTO_PLACES,
    MOVED_STATE,
    refused,
    unknown_optimizer,
)
from mindspeed_dsa.features.memory.recompute import wanted
from mindspeed_dsa.features.memory.recompute_limits import of_options
from mindspeed_dsa.patches.spec import Patch

_IMPL = "mindspeed_dsa.features.memory.swap_optimizer_impl"
_OPTIMIZER = "megatron.core.optimizer.optimizer"
_FLOAT16 = f"{_OPTIMIZER}:Float16OptimizerWithFloat16Params"
_FLOAT32 = f"{_OPTIMIZER}:FP32Optimizer"
_MIXED = f"{_OPTIMIZER}:MixedPrecisionOptimizer"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_BUCKETS = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"

_REFUSED = (
    *MOVED_STATE,
    ("qk_clip", "it changes master weights on the device, and there are none", "leave out --qk-clip"),
    (
        "log_params_norm",
        "it reads the master weights on the device, and there are none",
        "leave out --log-params-norm",
    ),
)


def problems(args: Any) -> Sequence[str]:
    """What in Megatron's arguments does not go together with the feature."""
    found = refused("--swap-optimizer", args, _REFUSED)
    found += unknown_optimizer("--swap-optimizer", args, ("adam",), "has other state than Adam's")
    times = getattr(args, "swap_optimizer_times", None)
    if times is not None and times < 1:
        found.append(f"--swap-optimizer-times {times}: a step has at least one part; use 1 or more")
    found += of_options(args, "swap_optimizer", "swap_optimizer_times")
    return found


FEATURE = Feature(
    name="swap-optimizer",
    summary="Keeps float32 master weights and Adam's moments on the host, and pipelines the step.",
    flags=(
        Flag(
            "--swap-optimizer",
            "Keep master weights and moments in host memory: 12 bytes a parameter less on the device, 12/DP "
            "with the distributed optimizer.",
        ),
        Flag(
            "--swap-optimizer-times",
            "Parts of a step: three of them are on the device at a time, 36/N bytes a parameter; default 16.",
            kind="value",
            type=int,
            metavar="N",
        ),
    ),
    patches=(
        Patch(
            "megatron.core.tensor_parallel.layers:copy_tensor_model_parallel_attributes",
            "wrap",
            f"{_IMPL}:without_master",
            "the optimizers call it for each master weight they make, which is freed before the next one",
            params=("destination_tensor", "source_tensor"),
        ),
        *(
            Patch(
                f"{optimizer}.__init__",
                "wrap",
                f"{_IMPL}:with_state_on_the_host",
                "state is laid out on the host",
                params=("optimizer", "config"),
            )
            for optimizer in (_FLOAT16, _DISTRIBUTED, _FLOAT32)
        ),
        Patch(
            f"{_BUCKETS}.start_grad_sync",
            "wrap",
            f"{_IMPL}:before_gradients_are_ready",
            "the first parts are loaded when the last backward has its first gradients",
        ),
        Patch(
            f"{_BUCKETS}.start_param_sync",
            "wrap",
            "mindspeed_dsa.features.memory.early_gather:unless_gathered",
            "a bucket's weights are gathered as soon as its parts are updated",
        ),
        *(
            Patch(
                f"{optimizer}.prepare_grads",
                "wrap",
                f"{_IMPL}:while_gradients_are_prepared",
                "the first parts are loaded by then, and dropped if the step is skipped",
            )
            for optimizer in (_MIXED, _FLOAT32, f"{_OPTIMIZER}:ChainedOptimizer")
        ),
        *(
            Patch(
                f"{optimizer}.step_with_ready_grads",
                "wrap",
                f"{_IMPL}:through_the_pipeline",
                "the inner optimizer's step is done part by part",
            )
            for optimizer in (_MIXED, _FLOAT32)
        ),
        *(
            Patch(
                f"{optimizer}._copy_main_params_to_model_params",
                "wrap",
                f"{_IMPL}:done_by_the_pipeline",
                "each part writes the model's weights while it is on the device",
            )
            for optimizer in (_FLOAT16, _DISTRIBUTED)
        ),
        *(
            Patch(
                f"{optimizer}._copy_model_params_to_main_params",
                "wrap",
                f"{_IMPL}:reloaded_on_the_host",
                "master weights are set from the model's, or from a state dict",
                params=("state_dict",),
            )
            for optimizer in (_FLOAT16, _DISTRIBUTED)
        ),
        *(
            Patch(
                f"{optimizer}.{method}",
                "wrap",
                f"{_IMPL}:{factory}",
                "checkpoints are read from the host and written to it",
            )
            for optimizer in (_FLOAT16, _FLOAT32, _DISTRIBUTED)
            for method, factory in (("state_dict", "from_the_host"), ("load_state_dict", "to_the_host"))
        ),
        *LOADED_INTO_PLACES,
        *(
            Patch(
                f"{_DISTRIBUTED}.{method}_main_param_and_optimizer_states",
                "wrap",
                f"{_IMPL}:{direction}_one_parameter",
                "checkpoints are read from the host and written to it",
                params=("model_param",),
            )
            for method, direction in (("_get", "from"), ("_set", "to"))
        ),
        Patch(
            f"{_DISTRIBUTED}.load_parameter_state_from_dp_zero_legacy",
            "wrap",
            f"{_IMPL}:of_all_parameters",
            "old checkpoints are copied into the master weights",
            params=("state_dict",),
        ),
    ),
    requires=Requires(versions={"megatron-core": ">=0.16,<0.17"}),
    conflicts=(
        Conflict(
            "reuse-fp32-param",
            "with --swap-optimizer there are no master weights on the device to share a storage with; use "
            "--swap-optimizer alone, which saves more",
        ),
    ),
    active=wanted("swap_optimizer", "swap_optimizer_times"),
    validate=problems,
    doc="swap-optimizer.md",
)
FEATURES = (FEATURE,)
