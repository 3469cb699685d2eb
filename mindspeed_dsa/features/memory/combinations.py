"""What in Megatron's arguments does not combine with a feature, told all at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

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
