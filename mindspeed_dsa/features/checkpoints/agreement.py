"""Work that all ranks do and end together: what one of them meets is raised on all of them."""

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
    """Return what the first rank finds, on all ranks: of a shared folder another machine may see less.

    Args:
        do: function that the first rank calls; it runs no collective, and its result can be pickled.
        who: speaks as in :func:`together`.

    Raises:
        RunError: on all ranks, as :func:`together` raises it.
    """
    told = [together(lambda: do() if is_first() else None, who)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(told, src=0)
    (result,) = told
    return cast("T", result)


def together(do: Callable[[], T], who: str) -> T:
    """Do something, wait for the other ranks, and raise what any of them has met on all.

    Without it a rank that raises would leave the others waiting in their next collective. Where there is one
    process alone, errors that are nobody's message pass as they are.

    Args:
        do: what this rank has to do, without a collective in it.
        who: speaks of what has no message of its own, such as ``mindspeed_dsa weights``.

    Returns:
        What ``do`` returns.

    Raises:
        RunError: on all ranks, with the messages of all, each once. What nobody has foreseen names its rank,
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
        sys.stderr.flush()  # before a launcher ends this process because another one has ended
        what = f"{type(error).__name__}: {error}"
        problem, cause = f"{who}: rank {rank} has met {what}; mend what its traceback shows", error
    problems = [problem]
    if ranks > 1:
        problems = [None] * ranks
        dist.all_gather_object(problems, problem)
    met = dict.fromkeys(each for each in problems if each is not None)
    if met:
        raise RunError("\n".join(met)) from cause
    (result,) = results
    return result
