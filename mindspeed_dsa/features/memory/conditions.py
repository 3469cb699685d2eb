"""Predicates that activate memory features, and argument conflicts that several of these features share.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mindspeed_dsa.megatron.configuration import argument, check_weight_shards
from mindspeed_dsa.megatron.graphs import OPTIMIZER, refuse_graphs

# -- activation: a switch or one of its options activates, so that an option without its switch is reported


def wanted(switch: str, *options: str) -> Callable[[Any], bool]:
    """Return a predicate on settings that is true if a feature's switch or any of its options is set.

    An option without its switch activates the feature too, so that the feature's validation can reject it.

    Args:
        switch: ``dest`` of the switch.
        options: ``dest`` of each option; its value is ``None`` if unset.
    """

    def active(settings: Any) -> bool:
        return bool(getattr(settings, switch, False)) or any(
            getattr(settings, option, None) is not None for option in options
        )

    return active


def any_of(*rules: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a predicate that is true when any of ``rules`` is."""
    return lambda settings: any(rule(settings) for rule in rules)


def without(rule: Callable[[Any], bool], feature: str) -> Callable[[Any], bool]:
    """Return a predicate on settings: ``rule`` holds, and ``feature``, which is resolved earlier, is off."""
    return lambda settings: rule(settings) and feature not in settings.features_on


def check_has_effect(switched_on: bool, switch: str, **options: Any) -> Iterator[str]:
    """Yield an error for each option that is set without its switch.

    Args:
        switched_on: state of the switch.
        switch: command line flag of the switch.
        options: values by ``dest``; ``None`` if unset.
    """
    if switched_on:
        return
    for option, value in options.items():
        if value is not None:
            yield f"--{option.replace('_', '-')} has no effect without {switch}; add that or drop it"


# -- argument conflicts --------------------------------------------------------------------------

Row = tuple[str, str, str]
"""Name of an argument, reason for the conflict, remedy."""

MOVED_STATE: tuple[Row, ...] = (
    (
        "use_precision_aware_optimizer",
        "it keeps master weights and moments in types and places of its own",
        "choose one of the two",
    ),
    ("optimizer_cpu_offload", "it moves the same state to the host", "choose one of the two"),
    ("use_megatron_fsdp", "it shards optimizer state by itself", "use --use-distributed-optimizer alone"),
    ("use_custom_fsdp", "it shards optimizer state by itself", "use --use-distributed-optimizer alone"),
    (
        "rl_offload_optimizer_during_inference",
        "it moves the same state to the host",
        "omit --rl-offload-optimizer-during-inference",
    ),
)
"""Arguments that conflict with features that move weights or optimizer state."""


def check_moved_adam(args: Any, flag: str) -> Iterator[str]:
    """Yield argument conflicts of a feature that relocates optimizer state and supports Adam only."""
    yield from check_arguments(args, flag, MOVED_STATE)
    yield from check_weight_shards(args, flag)
    yield from refuse_graphs(args, flag, "its step works on state in host memory", {OPTIMIZER})
    yield from check_optimizer(args, flag, ("adam",), "has other state than Adam's")


def check_arguments(args: Any, flag: str, rows: Iterable[Row]) -> Iterator[str]:
    """Yield an error for each argument in ``rows`` that is set together with ``flag``."""
    for name, why, remedy in rows:
        if argument(args, name):
            yield f"{flag} does not combine with {name}: {why}; {remedy}"


def check_optimizer(args: Any, flag: str, known: Sequence[str], why: str) -> Iterator[str]:
    """Yield an error if the optimizer is not one of ``known``."""
    optimizer = argument(args, "optimizer")
    if optimizer is not None and optimizer not in known:
        yield f"{flag}: --optimizer {optimizer} {why}; use one of {', '.join(known)}"
