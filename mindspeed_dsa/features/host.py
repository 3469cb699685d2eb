"""Megatron's modules for implementations, below whatever package stands for ``megatron``."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

_root = "megatron"


def use_root(root: str) -> None:
    """Called by the session before it arms patches: ``corp_megatron`` in a fork."""
    global _root
    _root = root


def current_root() -> str:
    """The package that stands for ``megatron``."""
    return _root


def host(name: str) -> ModuleType:
    """Import Megatron's module ``name``, such as ``core.parallel_state``.

    Implementations must not write ``import megatron``: in a fork with another root that would load a
    second Megatron, or none.
    """
    return import_module(f"{_root}.{name}")
