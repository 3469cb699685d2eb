"""Optimizer state on the host; the step is a pipeline of loading, updating and storing."""

from __future__ import annotations

from mindspeed_dsa.feature import Conflict, Feature, Flag, Requires
from mindspeed_dsa.features.memory.swap_optimizer.options import DEFAULT_TIMES, Options
from mindspeed_dsa.features.memory.swap_optimizer.validation import check_swapped_state
from mindspeed_dsa.features.memory.switches import wanted
from mindspeed_dsa.megatron import configuration, optimizer, releases
from mindspeed_dsa.megatron.optimizer import Hook
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.features.memory.swap_optimizer"
_BUCKETS = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
_CHECKPOINTS = "checkpoints are read from the host and written to it"

FEATURE = Feature(
    name="swap-optimizer",
    summary="Keeps float32 master weights and Adam's moments on the host, and pipelines the step.",
    flags=(
        Flag(
            "--swap-optimizer",
            "Keep master weights and moments in host memory: 12 bytes per parameter less on the device, "
            "12/DP with the distributed optimizer.",
        ),
        Flag(
            "--swap-optimizer-times",
            "Parts of a step: three of them are on the device at a time, 36/N bytes per parameter; default "
            f"{DEFAULT_TIMES}.",
            kind="value",
            type=int,
            metavar="N",
        ),
    ),
    patches=(
        Patch(
            "megatron.core.tensor_parallel.layers:copy_tensor_model_parallel_attributes",
            "wrap",
            f"{_HERE}.state_on_host:without_master",
            "the optimizers call it for each master weight they make, which is freed before the next one",
            params=("destination_tensor", "source_tensor"),
        ),
        Patch(
            f"{_BUCKETS}.start_grad_sync",
            "wrap",
            f"{_HERE}.state_on_host:load_before_gradients",
            "the first parts are loaded when the last backward has its first gradients",
        ),
        Patch(
            f"{_BUCKETS}.start_param_sync",
            "wrap",
            f"{_HERE}.early_gather:unless_gathered",
            "a bucket's weights are gathered as soon as its parts are updated",
        ),
        *optimizer.rows(
            f"{_HERE}.state_on_host:SwappedState",
            Hook("built", "state is laid out on the host"),
            Hook("before_grads", "the first parts are loaded by then, and dropped if the step is skipped"),
            Hook("step", "the inner optimizer's step is done part by part"),
            Hook("master_to_model", "each part writes the model's weights while it is on the device"),
            Hook("model_to_master", "master weights are set from the model's, or from a state dict"),
            Hook("state_dict", _CHECKPOINTS),
            Hook("load_state_dict", _CHECKPOINTS),
            Hook("get_parameter", _CHECKPOINTS),
            Hook("set_parameter", _CHECKPOINTS),
            Hook("load_parameters", "old checkpoints are copied into the master weights"),
        ),
    ),
    requires=Requires(versions={"megatron-core": releases.SERVED}),
    conflicts=(
        Conflict(
            "reuse-fp32-param",
            "with --swap-optimizer there are no master weights on the device to share a storage with; use "
            "--swap-optimizer alone, which saves more",
        ),
    ),
    active=wanted("swap_optimizer", "swap_optimizer_times"),
    options=Options.of,
    validate=configuration.validate(check_swapped_state, Options.of),
    doc="swap-optimizer.md",
)
FEATURES = (FEATURE,)
