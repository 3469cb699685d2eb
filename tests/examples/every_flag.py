"""Command lines are read up to the point where a model would be built, many of them in one process.

``python -m tests.examples.every_flag JOB`` reads ``[[argv, world size], ...]`` as JSON and prints a
``[status, output]`` for each. Status 0 means passed and 2 refused; anything else is the raised error.

``JOB`` is ``example`` (``examples/pretrain_dsa.py`` without its training) or ``pretrain_gpt`` (parser and
validation of the Megatron-LM on the path).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import mindspeed_dsa
from mindspeed_dsa import session
from mindspeed_dsa.feature import Flag

Refusal = mindspeed_dsa.MindSpeedDSAError


def spellings(flag: Flag, folder: Path) -> list[list[str]]:
    """Return each spelling of a flag on a command line, with a value that its declaration allows."""
    if flag.kind == "bool":
        return [[flag.name]]
    if flag.kind == "auto":
        return [[flag.name], ["--no-" + flag.name[2:]]]
    if flag.choices:
        return [[flag.name, str(flag.choices[-1])]]
    if flag.default is not None and not isinstance(flag.default, (int, float)):
        return [[flag.name, str(flag.default)]]
    return [[flag.name, {int: "2", float: "0.5"}.get(flag.type, str(folder / "nothing"))]]  # type: ignore[call-overload]


def example() -> Callable[[Sequence[str]], int]:
    """Return the example job as a function of its command line that returns the status."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    mindspeed_dsa.enable(
        mindspeed_platform="cpu",
        experimental_attention_variant="dsa",
        context_parallel_size=2,
        transformer_impl="local",
        moe_grouped_gemm=True,
        moe_permute_fusion=True,
    )
    from dsa_job import training
    from dsa_job.app import main

    training.train = lambda *args, **kwargs: []
    # These checks do not depend on patches, and applying patches takes seconds. Megatron's own modules stay
    # as the session above has left them.
    session.Session.arm = session.Session.undo = lambda self: None  # type: ignore[method-assign]
    mindspeed_dsa.disable()

    def run(argv: Sequence[str]) -> int:
        session.enable_from_argv(argv)
        return main(argv)

    return run


def pretrain_gpt() -> Callable[[Sequence[str]], int]:
    """Return Megatron-LM's parser and validation, patched as in its job."""
    with mindspeed_dsa.enabled(mindspeed_platform="cpu"):  # as in a job, compilers stay out
        from megatron.training import arguments

    def run(argv: Sequence[str]) -> int:
        with mock.patch.object(sys, "argv", ["pretrain_gpt.py", *argv]):
            session.enable_from_argv(argv)
            arguments.validate_args(arguments.parse_args())
        return 0

    return run


def main() -> None:
    """Answer the cases on stdin."""
    run = {"example": example, "pretrain_gpt": pretrain_gpt}[sys.argv[1]]()
    answers = [_one(run, argv, world) for argv, world in json.load(sys.stdin)]
    print(json.dumps(answers))


def _one(run: Callable[[Sequence[str]], int], argv: Sequence[str], world: int) -> tuple[int | str, str]:
    text = io.StringIO()
    status: int | str
    with _ranks(world), contextlib.redirect_stderr(text), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = run(argv)
        except Refusal as error:  # the one-liner and its hook print it in this form
            print(error, file=sys.stderr)
            status = 2
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else repr(error)
        except Exception as error:
            status = repr(error)
        finally:
            mindspeed_dsa.disable()
    return status, text.getvalue()


@contextlib.contextmanager
def _ranks(world: int) -> Iterator[None]:
    with mock.patch.dict(os.environ, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world)}):
        yield


if __name__ == "__main__":
    main()
