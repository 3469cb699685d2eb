"""What implementations tell while a job trains: once, and for each pipeline stage by one rank."""

from __future__ import annotations

import sys

import torch.distributed as dist

from mindspeed_dsa.features.host import host

_told: set[str] = set()


def tell(text: str) -> None:
    """Print a line on the first rank of each pipeline stage: stages hold different layers."""
    if _speaks():
        print(f"mindspeed_dsa: {text}", file=sys.stderr, flush=True)


def tell_once(text: str, about: str = "") -> None:
    """The same, and nothing where this process was told about it before.

    Args:
        text: the line.
        about: what it is about, where the text differs from time to time; default: the text.
    """
    about = about or text
    if about not in _told:
        _told.add(about)
        tell(text)


def forget() -> None:
    """Tell everything again."""
    _told.clear()


def _speaks() -> bool:
    if not dist.is_initialized():
        return True
    parallel_state = host("core.parallel_state")
    if not parallel_state.model_parallel_is_initialized():
        return dist.get_rank() == 0
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return bool(replica == 0 and parallel_state.get_tensor_model_parallel_rank() == 0)
