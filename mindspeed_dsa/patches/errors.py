"""Errors of the engine. Every message states who, what, and what to do."""

from __future__ import annotations

import sys
from types import TracebackType


class MindSpeedDSAError(Exception):
    """Base class of all errors of this library."""


def show_without_traceback() -> None:
    """Print uncaught errors of this library without a traceback.

    Their messages state who, what and what to do; a traceback through import machinery and Megatron would
    bury that.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, MindSpeedDSAError):
            print(error, file=sys.stderr, flush=True)
        else:
            previous(kind, error, trace)

    sys.excepthook = hook


class PatchDeclarationError(MindSpeedDSAError, ValueError):
    """A patch row is malformed; a defect of the feature that declares it."""


class PatchError(MindSpeedDSAError, RuntimeError):
    """One or more patches cannot be applied; the message lists all of them."""

    def __init__(self, problems: list[str], headline: str = "patches cannot be applied") -> None:
        self.problems = list(problems)
        super().__init__("\n".join([f"mindspeed_dsa: {headline}:", *(f"  - {p}" for p in problems)]))


class SettingsError(MindSpeedDSAError, ValueError):
    """A switch, or a combination of switches, that is invalid."""
