"""Storages whose bytes are freed after the forward and computed, or gathered, again in backward.

What moves saved tensors must leave these alone: their bytes are gone by the time a copy would be made, and
they are written to the same memory again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

_storages: WeakSet[Any] = WeakSet()


def mark(output: Tensor) -> None:
    """Record that the memory of ``output`` is going to be freed and filled again."""
    _storages.add(output.untyped_storage())


def is_marked(storage: Any) -> bool:
    """Whether :func:`mark` has been called for this memory.

    Args:
        storage: a ``torch.UntypedStorage``.
    """
    return storage in _storages


def bytes_of(storage: Any) -> Tensor:
    """All bytes of a ``torch.UntypedStorage``, as a uint8 tensor on the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def mark_outputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``checkpoint`` of Megatron's ``CheckpointWithoutOutput``."""

    def checkpoint(self: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        outputs = original(self, run_function, *args)
        for output in (outputs,) if isinstance(outputs, Tensor) else outputs:
            mark(output)
        return outputs

    return checkpoint
