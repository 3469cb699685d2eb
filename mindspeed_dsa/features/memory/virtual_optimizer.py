"""Adam's moments in host memory that the device addresses directly."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

from mindspeed_dsa.declarations import Conflict, Feature, Flag, Requires
from mindspeed_dsa.features.memory.combinations import (
    LOADED_INTO_PLACES,
    MOVED_STATE,
    refused,
    unknown_optimizer,
)
from mindspeed_dsa.patches.spec import Patch

_IMPL = "mindspeed_dsa.features.memory.virtual_optimizer_impl"
_OPTIMIZER = "megatron.core.optimizer.optimizer"
_FLOAT16 = f"{_OPTIMIZER}:Float16OptimizerWithFloat16Params"
_FLOAT32 = f"{_OPTIMIZER}:FP32Optimizer"
_MIXED = f"{_OPTIMIZER}:MixedPrecisionOptimizer"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_COPIES = "on NPUs moments cannot be copied as they are"
_GIB = 2**30


def gibibytes(word: str | float) -> float:
    """A quota: ``all``, or a number of GiB.

    Raises:
        ValueError: it is neither.
    """
    quota = math.nan
    with contextlib.suppress(ValueError):
        quota = math.inf if word == "all" else float(word)
    if not quota > 0 or (quota == math.inf and word != "all"):
        raise ValueError(f"--virtual-optimizer {word}: a quota is 'all' or a number of GiB above 0")
    return quota


def quota_of(words: Sequence[str | float] | str | float, stage: int, stages: int) -> float:
    """Bytes that a process may keep on the host.

    Args:
        words: of the flag.
        stage: the process's pipeline stage.
        stages: how many there are.

    Raises:
        ValueError: a quota that is none, or neither one nor one for each stage.
    """
    quotas = [gibibytes(word) for word in ([words] if isinstance(words, (str, int, float)) else words)]
    if len(quotas) not in (1, stages):
        raise ValueError(
            f"--virtual-optimizer has {len(quotas)} quotas for {stages} pipeline stages; give one for all of "
            + ("them" if stages == 1 else f"them, or {stages}")
        )
    return quotas[stage if len(quotas) > 1 else 0] * _GIB


def problems(args: Any) -> Sequence[str]:
    """What in Megatron's arguments does not go together with the feature."""
    found = refused("--virtual-optimizer", args, MOVED_STATE)
    found += unknown_optimizer("--virtual-optimizer", args, ("adam",), "has other state than Adam's")
    words = getattr(args, "virtual_optimizer", None)
    if words is not None:
        try:
            stages = getattr(args, "pipeline_model_parallel_size", None)
            quota_of(words, 0, len(words) if stages is None else stages)
        except (TypeError, ValueError) as error:
            found.append(str(error))
    return found


FEATURE = Feature(
    name="virtual-optimizer",
    summary="Keeps Adam's moments in host memory that the device addresses directly, within a quota.",
    flags=(
        Flag(
            "--virtual-optimizer",
            "Keep moments in host memory that the device addresses: 'all', or GiB for each process, or GiB "
            "for the processes of each pipeline stage. Up to 8 bytes a parameter less on the device.",
            kind="value",
            nargs="+",
            metavar="GIB",
        ),
    ),
    patches=(
        *(
            Patch(
                f"{optimizer}.__init__",
                "wrap",
                f"{_IMPL}:with_moments_on_the_host",
                "the moments get their places before the first step",
                params=("optimizer", "config"),
            )
            for optimizer in (_FLOAT16, _DISTRIBUTED, _FLOAT32)
        ),
        *(
            Patch(
                f"{optimizer}.step_with_ready_grads",
                "wrap",
                f"{_IMPL}:with_places",
                "an optimizer makes moments of its own for parameters that have none",
            )
            for optimizer in (_MIXED, _FLOAT32)
        ),
        *LOADED_INTO_PLACES,
        *(
            Patch(f"{optimizer}.state_dict", "wrap", f"{_IMPL}:with_copies", _COPIES)
            for optimizer in (_FLOAT16, _FLOAT32)
        ),
        *(
            Patch(
                f"{optimizer}.load_state_dict",
                "wrap",
                f"{_IMPL}:whole_again",
                "it ends the refusal that follows a step that failed in the middle",
                params=("state_dict",),
            )
            for optimizer in (_FLOAT16, _FLOAT32)
        ),
        Patch(
            f"{_DISTRIBUTED}._get_main_param_and_optimizer_states",
            "wrap",
            f"{_IMPL}:with_copies_of_one",
            _COPIES,
            params=("model_param",),
        ),
        Patch(
            f"{_DISTRIBUTED}._set_main_param_and_optimizer_states",
            "wrap",
            f"{_IMPL}:written_back_to_one",
            _COPIES,
            params=("model_param", "tensors"),
        ),
        Patch(
            f"{_DISTRIBUTED}.load_parameter_state_from_dp_zero_legacy",
            "wrap",
            f"{_IMPL}:written_back",
            _COPIES,
            params=("state_dict",),
        ),
    ),
    requires=Requires(versions={"megatron-core": ">=0.16,<0.17"}),
    conflicts=(
        Conflict(
            "swap-optimizer",
            "both move the moments to the host; use --swap-optimizer for the least device memory, or "
            "--virtual-optimizer to keep the optimizer's own step",
        ),
    ),
    active=lambda settings: getattr(settings, "virtual_optimizer", None) is not None,
    validate=problems,
    doc="virtual-optimizer.md",
)
FEATURES = (FEATURE,)
