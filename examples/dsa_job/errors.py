"""Errors that end the job with one clear message instead of a traceback."""

from __future__ import annotations

from collections.abc import Sequence


class JobError(Exception):
    """Error that ends the job; ``exit_code`` becomes the exit code of the process."""

    exit_code = 1


class UsageError(JobError):
    """A request that cannot be fulfilled; ``problems`` states each problem and its remedy."""

    exit_code = 2

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class NonFiniteLossError(JobError):
    """The loss or the gradient norm became NaN or infinite; that step's weights are not saved."""

    exit_code = 3


class Interrupted(JobError):
    """Ctrl-C."""

    exit_code = 130
