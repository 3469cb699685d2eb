"""Counters of calls of a module's functions, and of a logger's messages."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import pytest


@contextmanager
def counted(module: ModuleType, *names: str) -> Iterator[dict[str, int]]:
    """Count calls of a module's functions through its globals."""
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


@contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """Collect messages of a logger; for cases in the pool's workers, which have no ``caplog``."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def noted(monkeypatch: pytest.MonkeyPatch, *functions: FunctionType) -> list[str]:
    """Return a list that gets names of module functions when they are called through their module."""
    calls: list[str] = []
    for function in functions:

        def call(*args: Any, function: FunctionType = function) -> Any:
            calls.append(function.__name__)
            return function(*args)

        monkeypatch.setattr(sys.modules[function.__module__], function.__name__, call)
    return calls
