"""Interface over the differences between a CPU, a CUDA GPU and an Ascend NPU.

It does not include collectives: ``torch.distributed`` with ``async_op=True`` and ``wait()`` overlaps on gloo,
NCCL and HCCL with the same code.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    import torch

PlatformName = Literal["cpu", "cuda", "npu"]


class Event(Protocol):
    """Marker of a point in a stream's queue, to wait for or to measure times with."""

    def record(self, stream: Any = None) -> None:
        """Record the point that the stream (default: the current one) has reached."""

    def wait(self, stream: Any = None) -> None:
        """Make the stream wait for the point; does not block the host."""

    def query(self) -> bool:
        """Return whether all work before the point is done."""

    def synchronize(self) -> None:
        """Block the host until all work before the point is done."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this event to ``end_event``; both need ``timing=True``."""


class Stream(Protocol):
    """Queue of work that runs in order."""

    def wait_stream(self, stream: Any) -> None:
        """Make later work on this stream wait for all work submitted to ``stream`` so far."""

    def wait_event(self, event: Any) -> None:
        """Make later work on this stream wait for ``event``."""

    def synchronize(self) -> None:
        """Block the host until the queue is empty."""


@dataclass(frozen=True)
class MemoryFigures:
    """Memory of this process and of its device, in bytes."""

    current: int
    """Bytes held now: by the device's allocator, or on a CPU by the whole process (resident set)."""
    peak: int
    """Largest number of bytes held since the last reset."""
    total: int
    """Memory of the device."""
    free: int
    """Memory that the device could still allocate."""


class Platform(abc.ABC):
    """Interface to one kind of device: streams, events, and memory."""

    name: ClassVar[PlatformName]
    device_type: ClassVar[str]
    """``torch.device(...).type`` of tensors on this platform."""
    backend: ClassVar[str]
    """``torch.distributed`` backend for this device."""
    asynchronous: ClassVar[bool]
    """Whether work on a side stream can run concurrently with work on the current one."""
    mapped_by_kernels_only: ClassVar[bool] = False
    """Whether memory from :meth:`empty_mapped` works only in some kernels, and not in copies.

    These kernels take whole tensors: a view would be copied to the device and back."""

    @abc.abstractmethod
    def is_available(self) -> bool:
        """Return whether this process can run on the platform."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Device that this process uses."""

    @abc.abstractmethod
    def device_name(self) -> str:
        """Return the device's product name."""

    def device_count(self) -> int | None:
        """Return the number of visible devices, or ``None`` if ranks need no device of their own (CPU)."""
        return None

    @abc.abstractmethod
    def current_stream(self) -> Stream:
        """Return the stream that new work goes to."""

    @abc.abstractmethod
    def new_stream(self) -> Stream:
        """Create a side stream."""

    @cached_property
    def second_stream(self) -> Stream:
        """Cached side stream for work concurrent with the current stream."""
        return self.new_stream()

    @abc.abstractmethod
    def use_stream(self, stream: Stream) -> AbstractContextManager[Any]:
        """Return a context that submits work to ``stream``."""

    @abc.abstractmethod
    def new_event(self, timing: bool = False) -> Event:
        """Create an event; with ``timing`` it can measure times. It is not recorded yet."""

    @abc.abstractmethod
    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep the tensor's memory from being reused before ``stream`` has finished using the tensor."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Block the host until the device is idle."""

    @abc.abstractmethod
    def empty_pinned(self, size: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised host memory that the device can copy from and to asynchronously.

        Args:
            size: shape.
            dtype: element type.

        Returns:
            Tensor whose storage has the size of the pinned memory.
        """

    @abc.abstractmethod
    def release_pinned(self) -> None:
        """Free cached pinned memory that torch or the driver keeps for reuse."""

    @abc.abstractmethod
    def empty_mapped(self, size: Sequence[int], dtype: torch.dtype, owner: object) -> torch.Tensor:
        """Return uninitialised host memory that kernels of the device access in place.

        Args:
            size: shape.
            dtype: element type.
            owner: object whose lifetime defines how long the memory counts as in use.

        Returns:
            Tensor of this device. If :attr:`mapped_by_kernels_only`, it is a whole tensor, not a view.

        Raises:
            SettingsError: the device cannot address host memory.
        """

    @abc.abstractmethod
    def memory(self) -> MemoryFigures:
        """Return the memory that this process and its device use now, and the device's peak."""

    @abc.abstractmethod
    def reset_peak_memory(self) -> None:
        """Reset :attr:`MemoryFigures.peak` to the memory allocated now."""

    def facts(self) -> dict[str, Any]:
        """Return device facts that ``doctor`` prints. A value that is a dictionary gets several lines."""
        return {}

    @abc.abstractmethod
    def prepare(self) -> None:
        """Run the setup that is needed once, before Megatron is imported."""

    def read_mapped(self, mapped: torch.Tensor) -> torch.Tensor:
        """Return the content of mapped memory (:meth:`empty_mapped`) as a tensor that supports copies."""
        return mapped

    def write_mapped(self, mapped: torch.Tensor, values: torch.Tensor) -> None:
        """Copy values to memory from :meth:`empty_mapped`."""
        mapped.copy_(values)

    def copy_async(self, destination: torch.Tensor, source: torch.Tensor) -> Event:
        """Copy on the current stream without blocking the host.

        Args:
            destination: tensor of the same shape; host memory should come from :meth:`empty_pinned`.
            source: tensor that must not change before the returned event is done.

        Returns:
            Event recorded after the copy.
        """
        destination.copy_(source, non_blocking=True)
        event = self.new_event()
        event.record()
        return event
