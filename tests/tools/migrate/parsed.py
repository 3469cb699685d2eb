"""Command lines through Megatron-LM's parser and validation, with this library's flags and checks.

``python -m tests.tools.migrate.parsed`` reads ``[[argv, world size], ...]`` as JSON, and prints a line of
JSON for each: what stopped it, or an empty text. No patches are put in place for each of them, which takes
seconds: what is checked here does not hang on them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import mindspeed_dsa
from mindspeed_dsa import session
from mindspeed_dsa.platforms import host_pool

HOST_BYTES = 1 << 40
"""Free memory of a host with devices, whatever this one has; what is swapped has room there."""


def job() -> Callable[[Sequence[str]], Any]:
    """Return a function that parses and validates one command line as a job of Megatron-LM's does."""
    with mindspeed_dsa.enabled(mindspeed_platform="cpu"):
        from megatron.training import arguments

    def run(argv: Sequence[str]) -> None:
        with mock.patch.object(session.Session, "arm"), mock.patch.object(session.Session, "undo"):
            session.enable_from_argv(argv)
            running = session.current()
            assert running is not None
            with mock.patch.object(sys, "argv", ["pretrain_gpt.py", *argv]):
                args = arguments.parse_args(running.add_arguments)
            running.write_back(args)
            running.rewrite(args)
            with (
                mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
                mock.patch.object(arguments, "get_device_arch_version", return_value=9),
            ):
                arguments.validate_args(args)
            with mock.patch.object(host_pool, "host_memory_free", return_value=HOST_BYTES):
                running.validate(args)
            mindspeed_dsa.disable()

    return run


def main() -> None:
    """Answer the cases on stdin."""
    run = job()
    for argv, world in json.load(sys.stdin):
        said, stopped = io.StringIO(), ""
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world)}
        with (
            mock.patch.dict(os.environ, ranks),
            contextlib.redirect_stderr(said),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            try:
                run(argv)
            except SystemExit:
                stopped = said.getvalue().strip().splitlines()[-1]
            except Exception as error:
                stopped = f"{type(error).__name__}: {error}"
        print(json.dumps(stopped), flush=True)


if __name__ == "__main__":
    main()
