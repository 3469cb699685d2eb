"""Command lines through Megatron-LM's parser and validation, with this library's flags and checks.

``python -m tests.tools.migrate.parsed`` reads ``[[argv, world size], ...]`` as JSON. For each of them it
prints a line of JSON: the error, or an empty text. Patches, which take seconds, are not applied: these checks
do not depend on them.
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
"""Free memory of a host with devices, with room for swapped state, in place of this host's."""


def job() -> Callable[[Sequence[str]], Any]:
    """Return a function that parses and validates one command line like a job of Megatron-LM."""
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
