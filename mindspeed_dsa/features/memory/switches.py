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
