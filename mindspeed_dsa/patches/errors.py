"""Errors of the engine. Every message states who, what, and what to do."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import time
from types import TracebackType

REFUSED = 2
"""Exit status of a program that was asked for what cannot be done."""
_PATIENCE_S = 20.0  # how far apart ranks may start on a busy machine
_LOOK_EVERY_S = 0.1
_STARTED = time.time()
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
    """Print on one rank of this machine why all of them are about to end: on the first, if it ends too.

    The others wait for its word, also because launchers end all ranks as soon as one has ended. A rank that
    hears none has come to a verdict of its own, and prints it.
    """
    # Named by what the ranks of one job on one machine share.
    names = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT")]
    job = re.sub(r"\W", "_", "-".join([str(os.getppid()), *names]))
    spoken = os.path.join(tempfile.gettempdir(), f"mindspeed_dsa-{job}.said")
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)
        if "LOCAL_RANK" in os.environ:
            with contextlib.suppress(OSError):
                file = os.open(spoken, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
                os.utime(file)
                os.close(file)
        return
    for _ in range(int(_PATIENCE_S / _LOOK_EVERY_S)):
        with contextlib.suppress(OSError):
            if os.path.getmtime(spoken) > _STARTED - _PATIENCE_S:  # not an earlier job's
                return
        time.sleep(_LOOK_EVERY_S)
    print(text, file=sys.stderr, flush=True)


class PatchDeclarationError(MindSpeedDSAError, ValueError):
    """A patch row is malformed; a defect of the feature that declares it."""


class PatchError(MindSpeedDSAError, RuntimeError):
    """One or more patches cannot be applied; the message lists all of them."""

    def __init__(self, problems: list[str] | str, headline: str = "patches cannot be applied") -> None:
        self.headline = headline
        if isinstance(problems, str):  # Megatron raises it again
            self.problems = [problems]
            super().__init__(problems)
            return
        self.problems = list(problems)
        super().__init__("\n".join([f"mindspeed_dsa: {headline}:", *(f"  - {p}" for p in problems)]))


class SettingsError(MindSpeedDSAError, ValueError):
    """A switch, or a combination of switches, that is invalid."""
