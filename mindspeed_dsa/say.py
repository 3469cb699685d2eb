"""What a job is told while it runs: on stderr, by its first rank."""

from __future__ import annotations

import functools
import os
import sys


def say(text: str) -> None:
    """Print a line on the first rank."""
    if is_first_rank():
        print(f"mindspeed_dsa: {text}", file=sys.stderr, flush=True)


@functools.cache
def say_once(text: str) -> None:
    """The same, and nothing where this process was given that text before."""
    say(text)


def is_first_rank() -> bool:
    """Whether this is the job's first rank, as the launcher or else the process group tells."""
    if "RANK" in os.environ:
        return int(os.environ["RANK"]) == 0
    distributed = sys.modules.get("torch.distributed")  # whoever has a group has imported it
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return True
    return bool(distributed.get_rank() == 0)
