"""Calls that succeed or fail on all ranks together: an error of one rank is raised on every rank."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from mindspeed_dsa.patches.errors import MindSpeedDSAError
from mindspeed_dsa.runs.files import RunError

T = TypeVar("T")


def is_first() -> bool:
    """Return whether this is the first rank, or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0


def decided(do: Callable[[], T], who: str) -> T:
    """Call a function on the first rank and return its result on all ranks.

    Args:
        do: function without collectives; its result must be picklable.
        who: prefix of messages, as in :func:`together`.

    Raises:
        RunError: ``do`` failed; raised on all ranks as by :func:`together`.
    """
    # Only the first rank looks, because another machine may see less of a shared folder.
    told = [together(lambda: do() if is_first() else None, who)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(told, src=0)
    (result,) = told
    return cast("T", result)


def together(do: Callable[[], T], who: str) -> T:
    """Call a function on every rank, and raise on all ranks if it fails on any of them.

    Otherwise the other ranks would wait for the failed rank in their next collective. In a single process,
    errors without a message of this library pass through unchanged.

    Args:
        do: function for this rank, without collectives.
        who: prefix of messages for errors without one of their own, such as ``mindspeed_dsa weights``.

    Returns:
        Result of ``do`` on this rank.

    Raises:
        RunError: on all ranks, with the distinct messages of all ranks. An unexpected error names its rank,
            which prints the traceback.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    results: list[T] = []
    problem: str | None = None
    cause: Exception | None = None
    try:
        results.append(do())
    except MindSpeedDSAError as error:
        problem, cause = str(error), error
    except OSError as error:
        problem, cause = f"{who}: {error}; make room, or name a folder that can be read and written", error
    except Exception as error:
        if ranks == 1:
            raise
        traceback.print_exc()
        sys.stderr.flush()  # a launcher may end this process as soon as another rank exits
        what = f"{type(error).__name__}: {error}"
        problem, cause = f"{who}: rank {rank} has met {what}; mend what its traceback shows", error
    problems = [problem]
    if ranks > 1:
        problems = [None] * ranks
        dist.all_gather_object(problems, problem)  # also waits for all ranks
    met = dict.fromkeys(message for message in problems if message is not None)  # distinct, in rank order
    if met:
        raise RunError("\n".join(met)) from cause
    (result,) = results
    return result
