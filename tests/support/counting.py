"""Counting calls of a module's functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def counted(module: ModuleType, *names: str) -> Iterator[dict[str, int]]:
    """Count calls by the globals that the module's own code looks up."""
    counts = dict.fromkeys(names, 0)
    originals = {name: getattr(module, name) for name in names}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(module, name, counting(name))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(module, name, original)
