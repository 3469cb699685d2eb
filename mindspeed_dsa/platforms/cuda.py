"""NVIDIA GPUs: a thin layer over ``torch.cuda``, shared with accelerators that have the same interface."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.platforms.base import Event, MemoryFigures, Platform, PlatformName, Stream
from mindspeed_dsa.platforms.host_pool import shared, tensor_on

if TYPE_CHECKING:
    import torch


class _OnDevice:
    """Host memory with ``__cuda_array_interface__``, so that torch can view it as a device tensor."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory  # torch's tensor keeps this object alive, and this object the memory
        self.__cuda_array_interface__ = {
            "shape": tuple(memory.shape),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 2,
        }


class CudaPlatform(Platform):
    """Platform of NVIDIA GPUs: one GPU per process, NCCL between processes."""

    name: ClassVar[PlatformName] = "cuda"
    device_type = "cuda"
    backend = "nccl"
    asynchronous = True

    @property
    def _module(self) -> Any:
        import torch

        return torch.cuda

    def prepare(self) -> None:
        """Do nothing."""

    def is_available(self) -> bool:
        return bool(self._module.is_available())

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device(self.device_type, self._module.current_device())

    def device_count(self) -> int:
        return int(self._module.device_count())

    def device_name(self) -> str:
        return str(self._module.get_device_name())

    def current_stream(self) -> Stream:
        stream: Stream = self._module.current_stream()
        return stream

    def new_stream(self) -> Stream:
        stream: Stream = self._module.Stream()
        return stream

    def use_stream(self, stream: Stream) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def new_event(self, timing: bool = False) -> Event:
        event: Event = self._module.Event(enable_timing=timing)
        return event

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def synchronize(self) -> None:
        self._module.synchronize()

    def empty_pinned(self, size: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return system pages pinned by the CUDA runtime, or torch's pinned memory if it cannot pin them."""
        import torch

        # A size may be a number, as for torch.empty.
        shape = torch.Size([size] if isinstance(size, int) else size)
        nbytes = shape.numel() * dtype.itemsize
        # mmap cannot map 0 bytes.
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        pages = RegisteredPages(-1, nbytes)
        flat = tensor_on(pages)
        if not pages.register(self._module, flat.data_ptr()):
            # torch rounds pinned memory up to a power of two anyway; this way the storage's size shows it.
            rounded = 1 << (nbytes - 1).bit_length()
            flat = torch.empty(rounded, dtype=torch.uint8, device="cpu", pin_memory=True)[:nbytes]
        return flat.view(dtype).view(shape)

    def release_pinned(self) -> None:
        import torch

        release = getattr(torch._C, "_host_emptyCache", None)  # missing in some torch releases
        if release is not None:
            release()

    def empty_mapped(self, size: Sequence[int], dtype: torch.dtype, owner: object) -> torch.Tensor:
        """Return pinned memory of the pool. With unified addressing the device can use its pointer."""
        import torch

        memory = shared.keep(math.prod(size) * dtype.itemsize, owner)
        mapped = torch.as_tensor(_OnDevice(memory), device=self.device)
        if mapped.data_ptr() == memory.data_ptr():  # otherwise torch made a copy
            # Check that a write on the device is visible to the host.
            memory[-1] = 0
            mapped[-1:].fill_(1)
            self.synchronize()
            if int(memory[-1]) == 1:
                return mapped.view(dtype).view(*size)
        raise SettingsError(
            f"platform {self.name}: {self.device_name()} does not address pinned memory of the host by the "
            "host's pointers; omit --virtual-optimizer"
        )

    def memory(self) -> MemoryFigures:
        free, total = self._module.mem_get_info()
        return MemoryFigures(
            current=self._module.memory_allocated(),
            peak=self._module.max_memory_allocated(),
            total=total,
            free=free,
        )

    def reset_peak_memory(self) -> None:
        self._module.reset_peak_memory_stats()


_PORTABLE_AND_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped


class RegisteredPages(mmap.mmap):
    """Pages pinned by the CUDA runtime with their exact size; torch itself pins a power of two."""

    _module: Any = None
    _address: int
    _device: int

    def register(self, module: Any, address: int) -> bool:
        """Pin the pages until they are unmapped.

        Args:
            module: ``torch.cuda``.
            address: address of the pages.

        Returns:
            Whether the runtime could pin them.
        """
        if int(module.cudart().cudaHostRegister(address, len(self), _PORTABLE_AND_MAPPED)) != 0:
            return False
        self._module, self._address, self._device = module, address, module.current_device()
        return True

    # __del__ rather than weakref.finalize: a weak reference's callback runs after the pages are unmapped.
    def __del__(self) -> None:
        if self._module is None or sys.is_finalizing():
            return
        # The last reference may end in a thread whose current device is another one.
        with self._module.device(self._device):
            # No copy may still use the pages when they are unpinned.
            self._module.synchronize()
            self._module.cudart().cudaHostUnregister(self._address)
