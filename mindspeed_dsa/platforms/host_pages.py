"""Host memory straight from the system, page by page, as tensors."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_PORTABLE_AND_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped


class RegisteredPages(mmap.mmap):
    """Pages that a CUDA runtime has pinned: as many as asked for, where torch pins a power of two."""

    _runtime: Any = None
    _address: int

    def register(self, runtime: Any, address: int, synchronize: Callable[[], None]) -> bool:
        """Pin the pages until they go back to the system.

        Args:
            runtime: ``torch.cuda.cudart()``.
            address: where they are.
            synchronize: blocks until no copy is under way; called before they go back.

        Returns:
            Whether the runtime could.
        """
        if int(runtime.cudaHostRegister(address, len(self), _PORTABLE_AND_MAPPED)) != 0:
            return False
        self._runtime, self._address, self._synchronize = runtime, address, synchronize
        return True

    # A weak reference's callback comes after the pages are unmapped, which is too late.
    def __del__(self) -> None:
        if self._runtime is not None and not sys.is_finalizing():
            self._synchronize()
            self._runtime.cudaHostUnregister(self._address)


def tensor_on(pages: mmap.mmap) -> torch.Tensor:
    """uint8, ``[len(pages)]``; the pages live as long as the tensor's storage."""
    import torch

    return torch.frombuffer(pages, dtype=torch.uint8)
