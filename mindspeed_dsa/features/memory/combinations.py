"""What features of this folder have in common: what they refuse, and how checkpoints meet moved moments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.patches.spec import Patch

MOVED_STATE: tuple[tuple[str, str, str], ...] = (
    (
        "use_precision_aware_optimizer",
        "it keeps master weights and moments in types and places of its own",
        "choose one of the two",
    ),
    ("optimizer_cpu_offload", "it moves the same state to the host", "choose one of the two"),
    ("fp8", "weights in fp8 are made from the master weights in another way", "leave out --fp8-format"),
    ("fp4", "weights in fp4 are made from the master weights in another way", "leave out --fp4-format"),
    ("use_megatron_fsdp", "it shards optimizer state by itself", "use --use-distributed-optimizer alone"),
    ("use_torch_fsdp2", "it shards optimizer state by itself", "use --use-distributed-optimizer alone"),
    (
        "rl_offload_optimizer_during_inference",
        "it moves the same state to the host",
        "leave out --rl-offload-optimizer-during-inference",
    ),
)
"""What does not combine with features that move an optimizer's state."""


_OPTIMIZER = "megatron.core.optimizer.optimizer"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_IMPL = "mindspeed_dsa.features.memory.host_moments"

LOADED_INTO_PLACES = (
    Patch(
        f"{_DISTRIBUTED}.state_dict",
        "wrap",
        f"{_IMPL}:from_the_first_step_on",
        "torch's Adam has a step count to tell before its first step",
    ),
    *(
        Patch(
            f"{optimizer}.load_state_dict",
            "wrap",
            f"{_IMPL}:into_places",
            "moments are copied to their places, not to the device first",
            params=("state_dict",),
        )
        for optimizer in (
            f"{_OPTIMIZER}:Float16OptimizerWithFloat16Params",
            f"{_OPTIMIZER}:FP32Optimizer",
            _DISTRIBUTED,
        )
    ),
)
"""How checkpoints meet moments in places of their own."""


def refused(flag: str, args: Any, rows: Iterable[tuple[str, str, str]]) -> list[str]:
    """Problems with arguments that are set.

    Args:
        flag: of the feature.
        args: Megatron's namespace.
        rows: name of an argument, why it does not combine, what to do.
    """
    return [
        f"{flag} does not combine with {name}: {why}; {remedy}"
        for name, why, remedy in rows
        if getattr(args, name, None)
    ]


def unknown_optimizer(flag: str, args: Any, known: Sequence[str], why: str) -> list[str]:
    """A problem if another optimizer than these is asked for."""
    optimizer = getattr(args, "optimizer", None)
    if optimizer is None or optimizer in known:
        return []
    return [f"{flag}: --optimizer {optimizer} {why}; use one of {', '.join(known)}"]


def require_movable_state(who: str, config: Any, ddp_config: Any = None) -> None:
    """Check an optimizer that is being built; programs without Megatron's arguments come past no other.

    Args:
        who: name of the feature.
        config: the optimizer's.
        ddp_config: of its model, if it has one.

    Raises:
        SettingsError: its state cannot be moved.
    """
    configured = ("use_precision_aware_optimizer", "optimizer_cpu_offload")
    reasons = [f"with {name}" for name in configured if getattr(config, name, False)]
    if getattr(ddp_config, "use_megatron_fsdp", False):
        reasons.append("with use_megatron_fsdp")
    if config.optimizer != "adam":
        reasons.append(f"as {config.optimizer!r}, while only Adam's state is known")
    if reasons:
        raise SettingsError(
            f"{who}: the optimizer is configured {' and '.join(reasons)}, which does not combine with "
            "optimizer state on the host; change that, or switch the feature off"
        )
