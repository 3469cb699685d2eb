"""Declaration of swap-optimizer: optimizer state on the host, and a pipelined step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from mindspeed_dsa.environment import EnvironmentCheck, Finding, Surroundings
from mindspeed_dsa.feature import Conflict, Feature, Flag, Requires
from mindspeed_dsa.features.memory.conditions import (
    Row,
    check_arguments,
    check_has_effect,
    check_moved_adam,
    wanted,
)
from mindspeed_dsa.megatron import optimizer, releases
from mindspeed_dsa.megatron.graphs import REST, refuse_graphs
from mindspeed_dsa.megatron.low_precision import check_stored
from mindspeed_dsa.megatron.optimizer import Hook
from mindspeed_dsa.patches.spec import Patch

DEFAULT_TIMES = 16
_ALLOCATOR, _ROUNDING, _KNOWS_ROUNDING = "PYTORCH_NPU_ALLOC_CONF", "pinned_max_round_threshold_mb", "2.13"


@dataclass(frozen=True)
class Options:
    """Options of ``--swap-optimizer``.

    Attributes:
        switched_on: state of the feature's own switch.
        times: value of ``--swap-optimizer-times``, which sets the size of the staging buffers; ``None`` if
            unset.
    """

    switched_on: bool
    times: int | None

    @property
    def parts(self) -> int:
        """Return ``times``, or its default."""
        return DEFAULT_TIMES if self.times is None else self.times

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Build the options from resolved settings or from parsed arguments."""
        return cls(
            switched_on=bool(getattr(settings, "swap_optimizer", False)),
            times=getattr(settings, "swap_optimizer_times", None),
        )


_FLAG = "--swap-optimizer"
_REFUSED: tuple[Row, ...] = (
    ("qk_clip", "it changes master weights on the device, and there are none", "omit --qk-clip"),
    (
        "log_params_norm",
        "it reads the master weights on the device, and there are none",
        "omit --log-params-norm",
    ),
)


def check_swapped_state(args: Any, options: Options) -> Iterator[str]:
    """Yield arguments or optimizer settings that conflict with ``--swap-optimizer``."""
    yield from check_moved_adam(args, _FLAG)
    yield from check_stored(
        args, _FLAG, "it writes weights in parts, and the scale of such a weight needs all of it"
    )
    yield from check_arguments(args, _FLAG, _REFUSED)
    yield from refuse_graphs(args, _FLAG, "state is loaded early, while gradients are reduced", {REST})
    if options.times is not None and options.times < 1:
        yield f"{_FLAG}-times {options.times}: a step has at least one part; use 1 or more"
    yield from check_has_effect(options.switched_on, _FLAG, swap_optimizer_times=options.times)


_HERE = "mindspeed_dsa.features.memory.swap_optimizer"
_BUCKETS = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
_CHECKPOINTS = "checkpoints are read from the host and written to it"


def find_rounding(about: Surroundings) -> Iterator[Finding]:
    """Yield a finding if torch_npu rounds pinned buffers up to a power of two."""
    value = about.variable(_ALLOCATOR)
    try:
        knows = Version(about.machine.torch_npu or "0") >= Version(_KNOWS_ROUNDING)
    except InvalidVersion:
        return
    # Older releases of torch_npu do not have the option.
    if knows and _ROUNDING not in value:
        wanted = ",".join(filter(None, (value, f"{_ROUNDING}:128")))
        yield Finding(
            "note",
            f"{_ALLOCATOR} {value or 'not set'}",
            "torch_npu rounds the pinned buffers of --swap-optimizer up to a power of two, which takes up to "
            "twice the host memory",
            f"export {_ALLOCATOR}={wanted}",
        )


ROUNDING = EnvironmentCheck(
    "swap-optimizer-rounding",
    f"`{_ALLOCATOR}`",
    f"`--swap-optimizer` without `{_ROUNDING}`, from torch_npu {_KNOWS_ROUNDING} on",
    "torch_npu, environment variables",
    ("note",),
    find_rounding,
    platforms=("npu",),
)
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
            f"{_HERE}.state_on_host:unless_gathered",
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
            "--swap-optimizer moves the master weights to the host, so they cannot share storage with the "
            "weights on the device; use --swap-optimizer alone, which saves more",
        ),
    ),
    active=wanted("swap_optimizer", "swap_optimizer_times"),
    options=Options.of,
    check=check_swapped_state,
    environment=(ROUNDING,),
    doc="swap-optimizer.md",
)
