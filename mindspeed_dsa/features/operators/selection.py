"""Which small operators are fused: all that share one list, and what is wrong with a selection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Flag
from mindspeed_dsa.megatron.configuration import argument

OPERATORS = ("rmsnorm", "rotary-pos-emb", "swiglu", "mask-arithmetic")
_LIBRARY = "liger_kernel"

FUSED_OPERATORS = Flag(
    "--fused-operators",
    "Small operators to fuse: names from this list, all of them, or none, which is the default. rmsnorm, "
    "rotary-pos-emb and swiglu are also switched on by flags of their own.",
    kind="value",
    nargs="+",
    choices=("all", "none", *OPERATORS),
)


def selects(operator: str, switch: str = "") -> Callable[[Any], bool]:
    """Activation rule: on with its own switch, and where the list has its name or all of them.

    Args:
        operator: one of :data:`OPERATORS`.
        switch: ``dest`` of a flag, if it has one.
    """

    def active(settings: Any) -> bool:
        chosen = getattr(settings, FUSED_OPERATORS.dest, None) or ()
        return "all" in chosen or operator in chosen or bool(switch and getattr(settings, switch, False))

    return active


def is_named(args: Any, operator: str, switch: str) -> bool:
    """Whether somebody asked for this very operator, and not for all that have something to do."""
    return bool(argument(args, switch)) or operator in (argument(args, FUSED_OPERATORS.dest) or ())


def check_selection(args: Any, operator: str, switch: str = "") -> Iterator[str]:
    """A list that says none, and something else as well: what somebody wrote, and once."""
    chosen = argument(args, FUSED_OPERATORS.dest) or ()
    if "none" not in chosen:
        return
    if "all" in chosen:
        if operator == OPERATORS[0]:
            yield "--fused-operators has both all and none; drop one of them"
        return
    own = switch and argument(args, switch)
    other = f"--{switch.replace('_', '-')}" if own else f"{operator} in the same list"
    yield f"--fused-operators none contradicts {other}; drop one of them"


def check_library(operator: str) -> Iterator[str]:
    """The library that has the operator's kernels for GPUs."""
    if platforms.current().name == "cuda" and find_spec(_LIBRARY) is None:
        yield (
            f"{operator} runs on GPUs through Liger-Kernel, which is not installed; pip install "
            f"'mindspeed_dsa[liger]', or leave {operator} out of the fused operators"
        )
