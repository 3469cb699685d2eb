"""Layouts that no attention can be trained in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.context_parallel.algorithms import problems
from mindspeed_dsa.features.attention.algorithm_names.options import Options


def check_context_parallel(args: Any, options: Options) -> Iterator[str]:
    """Report what :func:`problems` finds; absent arguments are not checked."""
    yield from problems(args, options)
