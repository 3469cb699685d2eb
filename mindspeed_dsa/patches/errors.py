"""Exceptions of the package. Every message names the cause and the remedy."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType

REFUSED = 2
"""Exit status of a program that ends with an error of this library."""
_PATIENCE_S = 20.0  # how far apart ranks may start on a busy machine
_LOOK_EVERY_S = 0.1
_STARTED = time.time()
_BUILT_WITHIN = re.compile(r"( when instantiating \w+)+$")


class MindSpeedDSAError(Exception):
    """Base class of all errors of this library.

    When a module's constructor fails, Megatron raises the error again with `` when instantiating NAME``
    appended, once for every enclosing module. This class removes these suffixes.
    """

    def __init__(self, text: str = "") -> None:
        super().__init__(_BUILT_WITHIN.sub("", text))


def show_without_traceback() -> None:
    """Install an excepthook: uncaught errors of this library exit with status 2 and no traceback."""
    # The messages already name cause and remedy; a traceback through imports and Megatron would bury them.
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
    """Print a fatal error only on local rank 0; on all failing ranks if local rank 0 does not fail."""
    # Other ranks wait up to 20 s for rank 0's marker file. If none appears, only they have failed, and they
    # print `text` themselves. Waiting also protects rank 0: the launcher ends all ranks when one exits. The
    # file name is built from the values that the ranks of one job on one machine share.
    names = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT")]
    job = re.sub(r"\W", "_", "-".join([str(os.getppid()), *names]))
    spoken = os.path.join(tempfile.gettempdir(), f"mindspeed_dsa-{job}.said")
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)
        if "LOCAL_RANK" in os.environ:
            with contextlib.suppress(OSError):
                # The temporary folder is shared by all users: do not follow a link that someone else put
                # there.
                file = os.open(spoken, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
                # An earlier job with the same identifiers may have left the file; make it recent.
                os.utime(file)
                os.close(file)
        return
    for _ in range(int(_PATIENCE_S / _LOOK_EVERY_S)):
        with contextlib.suppress(OSError):
            if os.path.getmtime(spoken) > _STARTED - _PATIENCE_S:  # not an earlier job's
                return
        time.sleep(_LOOK_EVERY_S)
    print(text, file=sys.stderr, flush=True)


def shortened(names: Sequence[str], most: int) -> str:
    """Return names for a message, as ``a, b and 3 more``: the first ones, and the number of the others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


class PatchDeclarationError(MindSpeedDSAError, ValueError):
    """Malformed patch declaration: a bug in the feature that declares it."""


class PatchError(MindSpeedDSAError, RuntimeError):
    """Failure to apply one or more patches; the message lists all of them."""

    def __init__(self, problems: list[str] | str, headline: str = "patches cannot be applied") -> None:
        if isinstance(problems, str):  # Megatron raises the error again, with the finished text
            self.problems = [problems]
            super().__init__(problems)
            return
        self.problems = list(problems)
        super().__init__("\n".join([f"mindspeed_dsa: {headline}:", *(f"  - {p}" for p in problems)]))


class SettingsError(MindSpeedDSAError, ValueError):
    """Invalid flag, or invalid combination of flags."""
