"""Errors of the engine. Every message states who, what, and what to do."""

from __future__ import annotations

import os
import re
import sys
import time
from types import TracebackType

REFUSED = 2
"""Exit status of a program that was asked for what cannot be done."""
_PATIENCE_S = 20.0  # how far apart ranks may start on a busy machine
_BUILT_WITHIN = re.compile(r"( when instantiating \w+)+$")


class MindSpeedDSAError(Exception):
    """Base class of all errors of this library.

    Megatron raises an error from within a module again, as one of the same class, with the names of all
    modules that were being built after its text; these are left out.
    """

    def __init__(self, text: str = "") -> None:
        super().__init__(_BUILT_WITHIN.sub("", text))


def show_without_traceback() -> None:
    """Let uncaught errors of this library end the program with status 2 and no traceback.

    Their messages state who, what and what to do; a traceback through import machinery and Megatron would
    bury that.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, MindSpeedDSAError):
            previous(kind, error, trace)
            return
        program = os.path.basename(sys.argv[0])
        say_once(f"{program}: {error}" if program else str(error))
        sys.exit(REFUSED)  # the interpreter takes its status from there

    sys.excepthook = hook


def say_once(text: str) -> None:
    """Print on one rank of this machine why all of them are about to end.

    ``torchrun`` ends the others as soon as one has ended. Under it they wait, so that the first has printed
    by then; one that is still there afterwards has come to a verdict of its own.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return
        time.sleep(_PATIENCE_S)
    print(text, file=sys.stderr, flush=True)


class PatchDeclarationError(MindSpeedDSAError, ValueError):
    """A patch row is malformed; a defect of the feature that declares it."""


class PatchError(MindSpeedDSAError, RuntimeError):
    """One or more patches cannot be applied; the message lists all of them."""

    def __init__(self, problems: list[str] | str, headline: str = "patches cannot be applied") -> None:
        if isinstance(problems, str):  # Megatron raises it again
            self.problems = [problems]
            super().__init__(problems)
            return
        self.problems = list(problems)
        super().__init__("\n".join([f"mindspeed_dsa: {headline}:", *(f"  - {p}" for p in problems)]))


class SettingsError(MindSpeedDSAError, ValueError):
    """A switch, or a combination of switches, that is invalid."""
