"""Command line ``python -m mindspeed_dsa COMMAND``: commands to use outside of a training run."""

from __future__ import annotations

import os
import sys
from importlib import import_module

from mindspeed_dsa.patches.errors import MindSpeedDSAError, say_once
from mindspeed_dsa.patches.versions import of_distribution
from mindspeed_dsa.settings import did_you_mean, way_out
from mindspeed_dsa.tools.cli.overview import COMMANDS

_ELSEWHERE = {"features": "explain:list_features", "try": "trial:run"}
"""Commands that are not the function ``run`` of a module of their own name."""


def main(argv: list[str] | None = None) -> int:
    """Run one command, and return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if argv[0] == "--version":
        print(f"mindspeed_dsa {of_distribution('mindspeed_dsa') or '(a checkout that is not installed)'}")
        return 0
    if argv[0] not in COMMANDS:
        removed = "".join(f"; {said}" for said in way_out(argv[:1]))
        hint = removed or did_you_mean(argv[0], COMMANDS)
        print(f"mindspeed_dsa: there is no command {argv[0]!r}{hint}\n\n{_usage()}", file=sys.stderr)
        return 2
    try:
        module, _, function = _ELSEWHERE.get(argv[0], f"{argv[0].replace('-', '_')}:run").partition(":")
        status: int = getattr(import_module(f"mindspeed_dsa.tools.cli.{module}"), function)(argv[1:])
        # Flush here, so that a closed pipe raises inside the try block.
        sys.stdout.flush()
    except MindSpeedDSAError as error:
        say_once(str(error))
        return 2
    except BrokenPipeError:  # the reader has closed the pipe, as in `... | head`: drop the rest
        # The interpreter flushes stdout again at exit, which must not raise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is None:
            raise
        say_once(f"mindspeed_dsa {argv[0]}: {error.filename}: {error.strerror}")
        return 2
    return status


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: python -m mindspeed_dsa COMMAND [--help] | --version", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
