"""Bytes of one device storage that spend the time between forward and backward on the host.

Copies run on two streams of their own, one per direction. Nothing is resized, and no memory is taken from
other users: the device has the bytes as long as anything holds the storage.
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
    """Return the stream to the host, and the one back."""
    return platform.new_stream(), platform.new_stream()


class SwappedStorage:
    """Storage and its copy on the host.

    The copy to the host starts at once, behind what the current stream has computed so far. The host's
    buffer goes back to the pool, and the device's memory to its allocator, with the last reference to this
    object, whatever happens to the graph that it belongs to.

    Args:
        storage: a ``torch.UntypedStorage`` on the device, not empty.
        dtype: of the tensors on it: torch_npu describes a storage in numbers of the type that it was made
            with, and copies tensors whose shape does not fit that description.
        of_any_stream: it may have been allocated while another stream than the current one was, whose later
            work does not wait for the copy. The allocator then keeps the memory until it sees the copy done,
            which is later than the current stream needs where the host runs ahead of the device.
        copies: events of its copies are noted here.

    Raises:
        SettingsError: the host has no memory left.
    """

    def __init__(
        self, storage: Any, dtype: torch.dtype, of_any_stream: bool = False, copies: Copies | None = None
    ) -> None:
        self.nbytes: int = storage.nbytes()
        self._copies = copies
        self._device = storage.device
        # A storage may have a few bytes more than whole numbers.
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
        """Let the device's memory go.

        What the current stream is given from now on comes after the copy, so it may use the memory.
        """
        assert self._last_copy is not None
        self._last_copy.wait(platforms.current().current_stream())
        self._storage = None

    def come_back(self) -> None:
        """Start copying to the device, unless the bytes are there or on their way.

        A storage that has been kept elsewhere is used again instead.
        """
        if self._storage is not None:
            return
        former = self._former()
        if former is not None and former.nbytes() == self.nbytes:
            self._storage = former
            return
        platform = platforms.current()
        _, stream = _streams(platform)
        # Allocated for the current stream, which is the one that uses it; the copy waits until memory
        # that the allocator hands out again is no longer in use there.
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
        """Return the storage; the current stream waits until its bytes are there."""
        self.come_back()
        if self._back is not None:
            platform = platforms.current()
            stream = platform.current_stream()
            if self._copies is not None and self._copies.read is None:
                self._copies.read = now()
            self._back.wait(stream)
            if stream != self._consumer:  # the memory is the consumer's: this one reads it as a guest
                platform.record_stream(bytes_of(self._storage), stream)
        return self._storage

    def __del__(self) -> None:
        buffer = getattr(self, "_buffer", None)
        if buffer is None:  # there was no memory for one
            return
        if self._back is not None:
            # Perhaps nothing has waited: the memory must not be handed out under the copy.
            self._back.wait(self._consumer)
        buffer.give_back(after=self._last_copy)


def _copy_behind_current(
    platform: Platform, stream: Stream, destination: Tensor, source: Tensor, timed: bool
) -> tuple[Event, tuple[Event, Event] | None]:
    """Copy on a stream what the current one has computed; return the copy's event, and its times if asked."""
    ready = platform.new_event()
    ready.record(platform.current_stream())
    with platform.use_stream(stream):
        ready.wait(stream)
        begin = now(stream) if timed else None
        event = platform.copy_async(destination, source)
        return event, None if begin is None else (begin, now(stream))
