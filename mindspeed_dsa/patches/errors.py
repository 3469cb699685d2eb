"""Errors of the engine. Every message names who, what, and what to do."""

from __future__ import annotations

import sys
from types import TracebackType


class MindSpeedDSAError(Exception):
    """Base of every error this library raises on purpose."""


def show_without_traceback() -> None:
    """Let our own errors, when nobody catches them, end the process with their message alone.

    They say who, what and what to do; the traceback through import machinery and Megatron would
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
    """A switch, or a combination of switches, that cannot be honoured."""
