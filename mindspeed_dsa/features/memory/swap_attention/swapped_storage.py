"""Device storage whose bytes are on the host between forward and backward.

Copies run on two dedicated streams, one per direction. Storages are never resized, so the bytes stay on the
device as long as anything else references the storage.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from mindspeed_dsa import platforms
from mindspeed_dsa.features.memory.swap_attention.hidden_copies import Copies, now
from mindspeed_dsa.parallel.saved_tensors import bytes_of
from mindspeed_dsa.platforms.base import Event, Platform, Stream
from mindspeed_dsa.platforms.host_pool import shared

_REMEDY = (
    "swap fewer layers (--swap-attention-num-layers N) or modules (--swap-modules), use smaller "
    "microbatches, or give the process more memory"
)


@functools.cache
def _streams(platform: Platform) -> tuple[Stream, Stream]:
    """Return the copy streams: device to host, and host to device."""
    return platform.new_stream(), platform.new_stream()


class SwappedStorage:
    """Storage and its copy on the host.

    The copy to the host starts at once, after the work queued on the current stream. Deleting the last
    reference to this object returns the host buffer to the pool and the device memory to its allocator.

    Args:
        storage: nonempty ``torch.UntypedStorage`` on the device.
        dtype: dtype of the tensors on the storage, also used for the new storage in :meth:`come_back`.
            torch_npu attaches a dtype and shape to each storage, and makes an extra copy of tensors that do
            not match them.
        of_any_stream: whether the storage may have been allocated on a stream other than the current one.
            That stream's later work does not wait for the copy, so ``record_stream`` is used: the allocator
            reuses the memory only after it has seen the copy finish. If the host runs ahead of the device,
            this is later than necessary.
        copies: record to fill with the copies' timing events; ``None`` without measurement.

    Raises:
        SettingsError: the host has no memory left.
    """

    def __init__(
        self, storage: Any, dtype: torch.dtype, of_any_stream: bool = False, copies: Copies | None = None
    ) -> None:
        self.nbytes: int = storage.nbytes()
        self._copies = copies
        self._device = storage.device
        # A storage may have a few bytes beyond a multiple of the item size.
        self._dtype = dtype if self.nbytes % dtype.itemsize == 0 else torch.uint8
        self._storage: Any = storage
        self._former: ref[Any] = ref(storage)
        self._last_copy: Event | None = None
        self._back: Event | None = None
        self._consumer: Stream | None = None
        self._buffer = shared.take(self.nbytes, remedy=_REMEDY)
        platform = platforms.current()
        stream, _ = _streams(platform)
        source = bytes_of(storage)
        self._last_copy, times = _copy_behind_current(
            platform, stream, self._buffer.tensor, source, timed=copies is not None
        )
        if copies is not None:
            copies.out = times
        if of_any_stream:
            platform.record_stream(source, stream)

    def leave(self) -> None:
        """Release the device memory; the current stream's later work waits for the copy to the host."""
        assert self._last_copy is not None
        # The memory may therefore be reused by the current stream at once.
        self._last_copy.wait(platforms.current().current_stream())
        self._storage = None

    def come_back(self) -> None:
        """Start the copy back to the device, unless the bytes are already there or being copied.

        No copy is needed if another reference has kept the original storage alive.
        """
        if self._storage is not None:
            return
        former = self._former()
        if former is not None and former.nbytes() == self.nbytes:
            self._storage = former
            return
        platform = platforms.current()
        _, stream = _streams(platform)
        # Allocate on the current stream, which reads the memory. The allocator may return memory that earlier
        # work of this stream still uses, so the copy waits for that work.
        numbers = self.nbytes // self._dtype.itemsize
        place = torch.empty(numbers, dtype=self._dtype, device=self._device)
        source = self._buffer.tensor.view(self._dtype)
        timed = self._copies is not None
        self._last_copy, times = _copy_behind_current(platform, stream, place, source, timed)
        if self._copies is not None:
            self._copies.back = times
        self._back, self._consumer = self._last_copy, platform.current_stream()
        self._storage = place.untyped_storage()

    def on_device(self) -> Any:
        """Return the device storage; makes the current stream wait for the copy."""
        self.come_back()
        if self._back is not None:
            platform = platforms.current()
            stream = platform.current_stream()
            if self._copies is not None and self._copies.read is None:
                self._copies.read = now()
            self._back.wait(stream)
            # The memory belongs to the consumer's stream, and another stream reads it here.
            if stream != self._consumer:
                platform.record_stream(bytes_of(self._storage), stream)
        return self._storage

    def __del__(self) -> None:
        buffer = getattr(self, "_buffer", None)
        if buffer is None:  # the constructor failed to get host memory
            return
        if self._back is not None:
            # Nothing may have waited for the copy: the memory must not be reused while it is written.
            self._back.wait(self._consumer)
        buffer.give_back(after=self._last_copy)


def _copy_behind_current(
    platform: Platform, stream: Stream, destination: Tensor, source: Tensor, timed: bool
) -> tuple[Event, tuple[Event, Event] | None]:
    """Copy on ``stream`` after the current stream's work; return its event, and (begin, end) if ``timed``."""
    ready = platform.new_event()
    ready.record(platform.current_stream())
    with platform.use_stream(stream):
        ready.wait(stream)
        begin = now(stream) if timed else None
        event = platform.copy_async(destination, source)
        return event, None if begin is None else (begin, now(stream))
