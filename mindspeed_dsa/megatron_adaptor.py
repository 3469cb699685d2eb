"""One-line entry point: ``import mindspeed_dsa.megatron_adaptor`` at the top of a training script.

The import reads environment and command line, and applies the patches of every feature that they switch on.
Megatron may be imported before or after it. Nothing is changed if no feature is on.
"""

import os
import sys
from functools import partial
from importlib import import_module
from typing import Any

from mindspeed_dsa import session
from mindspeed_dsa.patches.errors import MindSpeedDSAError, show_without_traceback
from mindspeed_dsa.settings import ACCEPT_MINDSPEED


def _checkpoint_size(command: list[str], args: Any) -> float | None:
    """Return the planned size of a checkpoint in bytes, for the start report."""
    from mindspeed_dsa.tools.planner.checkpoint import size_of

    return size_of(command, getattr(args, "padded_vocab_size", None))


def _accept(command: list[str]) -> bool:
    """Translate MindSpeed's flags in place if the job asks for it, and return whether it does."""
    translator = "mindspeed_dsa.tools.migrate.accept"
    # A second import of this module finds the flag already removed from the translated command line.
    known = translator in sys.modules
    if not known and ACCEPT_MINDSPEED.name not in command and ACCEPT_MINDSPEED.env not in os.environ:
        return False
    return bool(import_module(translator).accept(command))


try:
    arguments = sys.argv[1:]
    accepted = [ACCEPT_MINDSPEED.name] if _accept(arguments) else []
    # The job's own parser must see the translated command line.
    sys.argv[1:] = arguments
    session.enable_from_argv([*accepted, *arguments])
    if (running := session.current()) is not None:
        running.checkpoint_size = partial(_checkpoint_size, [sys.argv[0], *arguments])
        # Report missing packages now: Megatron's own import would fail before any check of the arguments.
        running.look_at_installation()
except MindSpeedDSAError:
    show_without_traceback()
    raise
