"""A switch and its options: on with either, so that an option without its switch is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def wanted(switch: str, *options: str) -> Callable[[Any], bool]:
    """Activation rule: on with its switch, or with an option, which is then refused by validation.

    Args:
        switch: ``dest`` of a flag.
        options: those of its options, ``None`` if unset.
    """

    def active(settings: Any) -> bool:
        return bool(getattr(settings, switch, False)) or any(
            getattr(settings, option, None) is not None for option in options
        )

    return active


def any_of(*rules: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Activation rule: on where one of the rules says so."""
    return lambda settings: any(rule(settings) for rule in rules)


def is_given(option: str) -> Callable[[Any], bool]:
    """Activation rule: on where an option has a value."""
    return lambda settings: getattr(settings, option, None) is not None


def without(rule: Callable[[Any], bool], feature: str) -> Callable[[Any], bool]:
    """Activation rule: on as the rule says, where another feature, which is decided earlier, is off."""
    return lambda settings: rule(settings) and feature not in settings.features_on


def check_has_effect(switched_on: bool, switch: str, **options: Any) -> Iterator[str]:
    """Problems of options that are set without their switch.

    Args:
        switched_on: whether it is on.
        switch: the flag.
        options: values by ``dest``, ``None`` if unset.
    """
    if switched_on:
        return
    for option, value in options.items():
        if value is not None:
            yield f"--{option.replace('_', '-')} has no effect without {switch}; add that or drop it"
