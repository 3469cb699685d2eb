"""The context of a patch: its feature's options, Megatron's modules and a logger, for one session."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Generic, TypeVar

from mindspeed_dsa.log import Log

Options = TypeVar("Options")


@dataclass(frozen=True)
class Megatron:
    """Megatron's modules, below the package that replaces ``megatron`` in this session.

    Implementations must not write ``import megatron``: in a fork with another root that would load a
    second Megatron, or none.

    Attributes:
        root: the top-level package, ``corp_megatron`` in a fork.
    """

    root: str = "megatron"

    def __call__(self, name: str) -> ModuleType:
        """Import Megatron's module ``name``, such as ``core.parallel_state``."""
        return import_module(f"{self.root}.{name}")


@dataclass(frozen=True)
class Context(Generic[Options]):
    """Built once for each feature, when a session arms its patches; it never changes.

    A ``wrap`` factory that takes ``(original, context)``, and every ``factory`` row, gets the context of
    the feature that claims the site. Implementations read settings nowhere else.

    Attributes:
        feature: the feature's name.
        options: the result of ``Feature.options``.
        megatron: this session's Megatron.
        log: the feature's logger.
    """

    feature: str
    options: Options
    megatron: Megatron
    log: Log
