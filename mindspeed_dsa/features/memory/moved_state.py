"""What does not combine with features that move weights or optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mindspeed_dsa.features.memory.weight_shards import check_weight_shards
from mindspeed_dsa.megatron.configuration import argument

Row = tuple[str, str, str]
"""Name of an argument, why it does not combine, what to do."""

MOVED_STATE: tuple[Row, ...] = (
    (
        "use_precision_aware_optimizer",
        "it keeps master weights and moments in types and places of its own",
        "choose one of the two",
    ),
    ("optimizer_cpu_offload", "it moves the same state to the host", "choose one of the two"),
    ("fp8", "weights in fp8 are made from the master weights in another way", "omit --fp8-format"),
    ("fp4", "weights in fp4 are made from the master weights in another way", "omit --fp4-format"),
    ("use_megatron_fsdp", "it shards optimizer state by itself", "use --use-distributed-optimizer alone"),
    ("use_custom_fsdp", "it shards optimizer state by itself", "use --use-distributed-optimizer alone"),
    (
        "rl_offload_optimizer_during_inference",
        "it moves the same state to the host",
        "omit --rl-offload-optimizer-during-inference",
    ),
)


def check_arguments(args: Any, flag: str, rows: Iterable[Row]) -> Iterator[str]:
    """Problems of the feature that ``flag`` switches on with arguments that are set."""
    for name, why, remedy in rows:
        if argument(args, name):
            yield f"{flag} does not combine with {name}: {why}; {remedy}"


def check_optimizer(args: Any, flag: str, known: Sequence[str], why: str) -> Iterator[str]:
    """A problem if another optimizer than the ``known`` ones is asked for."""
    optimizer = argument(args, "optimizer")
    if optimizer is not None and optimizer not in known:
        yield f"{flag}: --optimizer {optimizer} {why}; use one of {', '.join(known)}"


def check_moved_adam(args: Any, flag: str) -> Iterator[str]:
    """What features that know Adam's state alone, and move it, have in common."""
    yield from check_arguments(args, flag, MOVED_STATE)
    yield from check_weight_shards(args, flag)
    yield from check_optimizer(args, flag, ("adam",), "has other state than Adam's")
    if argument(args, "use_torch_fsdp2") and argument(args, "ckpt_format") == "torch_dcp":
        yield (
            f"{flag} does not combine with --ckpt-format torch_dcp, which would take a rank's pieces of the "
            "moments for whole ones; use torch_dist"
        )
