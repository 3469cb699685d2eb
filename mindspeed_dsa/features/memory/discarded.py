"""Storages whose bytes are freed after the forward and computed again in backward.

Who moves saved tensors about leaves them alone: their bytes are gone by the time a copy would be made, and
their place is where the recomputed bytes will be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from torch import Tensor

_storages: WeakSet[Any] = WeakSet()


def mark(output: Tensor) -> None:
    """The memory of ``output`` is going to be freed and filled again."""
    _storages.add(output.untyped_storage())


def is_marked(storage: Any) -> bool:
    """Whether that has been said of this memory.

    Args:
        storage: a ``torch.UntypedStorage``.
    """
    return storage in _storages


def mark_outputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``checkpoint`` of Megatron's ``CheckpointWithoutOutput``."""

    def checkpoint(self: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        outputs = original(self, run_function, *args)
        for output in (outputs,) if isinstance(outputs, Tensor) else outputs:
            mark(output)
        return outputs

    return checkpoint
