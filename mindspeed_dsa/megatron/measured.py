"""The one rule for what a feature measures before it chooses: not under deterministic training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.megatron.configuration import argument


def check_measured(args: Any, flag: str, measured: str, fix: str) -> Iterator[str]:
    """Refuse a choice that is measured, in arguments or in a model's configuration.

    Every feature that measures (:func:`mindspeed_dsa.parallel.timing.timed`) asks this.

    Args:
        args: a job's arguments, or a configuration.
        flag: that has something measured.
        measured: what.
        fix: what the user does in order to choose it instead, in the imperative.
    """
    if argument(args, "deterministic_mode"):
        yield (
            f"{flag} measures {measured}, so that two runs may choose differently and differ in the last "
            f"bits, which --deterministic-mode rules out; {fix}, or train without --deterministic-mode "
            "(--no-deterministic-mode where a job has it by default)"
        )
