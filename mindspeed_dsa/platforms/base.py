"""The small interface for what differs between a CPU, a CUDA GPU and an Ascend NPU.

Collectives are not in it: ``torch.distributed`` with ``async_op=True`` and ``wait()`` overlaps on
gloo, NCCL and HCCL with one code path.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    import torch

PlatformName = Literal["cpu", "cuda", "npu"]


class Event(Protocol):
    """A point in a stream's order of work."""

    def record(self, stream: Any = None) -> None:
        """Mark the point that the stream (default: the current one) has reached."""

    def wait(self, stream: Any = None) -> None:
        """Make the stream wait for the point; does not block the host."""

    def query(self) -> bool:
        """Return whether everything before the point is done."""

    def synchronize(self) -> None:
        """Block the host until it is."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to ``end_event``; both need ``timing=True``."""


class Stream(Protocol):
    """A queue of work that runs in order."""

    def wait_stream(self, stream: Any) -> None:
        """Let later work here wait for what ``stream`` holds now."""

    def wait_event(self, event: Any) -> None:
        """Let later work here wait for ``event``."""

    def record_event(self, event: Any = None) -> Any:
        """Record ``event`` (default: a new one) here and return it."""

    def synchronize(self) -> None:
        """Block the host until the queue is empty."""


@dataclass(frozen=True)
class MemoryFigures:
    """Memory of this process and of its device, in bytes."""

    current: int
    """Held now: by the device's allocator, on a CPU by the whole process (resident set)."""
    peak: int
    """Most held since the last reset."""
    total: int
    """What the device has."""
    free: int
    """What the device could still give."""


class Platform(abc.ABC):
    """One kind of device, as this library sees it."""

    name: ClassVar[PlatformName]
    device_type: ClassVar[str]
    """What ``torch.device(...).type`` says of tensors here."""
    backend: ClassVar[str]
    """Backend of ``torch.distributed`` for this device."""
    asynchronous: ClassVar[bool]
    """Whether work on a side stream can run at the same time as work on the current one."""
    mapped_by_kernels_only: ClassVar[bool] = False
    """Whether :meth:`empty_mapped` gives memory that some kernels read and write and copies do not.

    They take whole tensors: a view of such memory is copied to the device and back."""

    @abc.abstractmethod
    def is_available(self) -> bool:
        """Return whether this process could run here."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """The device this process works on."""

    @abc.abstractmethod
    def device_name(self) -> str:
        """Return the device's own name."""

    def device_count(self) -> int | None:
        """Return the number of devices that this process sees; None where that limits no ranks."""
        return None

    @abc.abstractmethod
    def current_stream(self) -> Stream:
        """The stream that new work goes to."""

    @abc.abstractmethod
    def new_stream(self) -> Stream:
        """A side stream."""

    @abc.abstractmethod
    def use_stream(self, stream: Stream) -> AbstractContextManager[Any]:
        """Send the work of a ``with`` block to ``stream``."""

    @abc.abstractmethod
    def new_event(self, timing: bool = False) -> Event:
        """An event, not yet recorded."""

    @abc.abstractmethod
    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep the tensor's memory from being reused before ``stream`` is done with it."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Block the host until the device is idle."""

    @abc.abstractmethod
    def empty_pinned(self, size: Any, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory that the device can copy from and to asynchronously.

        Args:
            size: shape.
            dtype: element type.

        Returns:
            A tensor whose storage is as large as what is pinned for it.
        """

    @abc.abstractmethod
    def release_pinned(self) -> None:
        """Give pinned memory back to the system that was freed and is kept for reuse below this library."""

    @abc.abstractmethod
    def empty_mapped(self, size: Sequence[int], dtype: torch.dtype, owner: object) -> torch.Tensor:
        """Uninitialised memory of the host that kernels of the device read and write where it is.

        Args:
            size: shape.
            dtype: type of the elements.
            owner: as long as it lives, the memory counts as in use.

        Returns:
            A tensor of this device; where :attr:`mapped_by_kernels_only`, no view.

        Raises:
            SettingsError: the device does not address it.
        """

    @abc.abstractmethod
    def memory(self) -> MemoryFigures:
        """Memory in use."""

    @abc.abstractmethod
    def reset_peak_memory(self) -> None:
        """Let :attr:`MemoryFigures.peak` start again from what is held now."""

    def facts(self) -> dict[str, Any]:
        """Return more for ``doctor`` to say; a dictionary among the values has lines of its own."""
        return {}

    @abc.abstractmethod
    def prepare(self) -> None:
        """Whatever has to happen once, before Megatron is imported."""

    def read_mapped(self, mapped: torch.Tensor) -> torch.Tensor:
        """Return memory from :meth:`empty_mapped` as a tensor that can be copied; maybe the same one."""
        return mapped

    def write_mapped(self, mapped: torch.Tensor, values: torch.Tensor) -> None:
        """Copy to memory from :meth:`empty_mapped`."""
        mapped.copy_(values)

    def copy_async(self, destination: torch.Tensor, source: torch.Tensor) -> Event:
        """Copy on the current stream without blocking the host.

        Args:
            destination: tensor of the same shape; host memory should be from :meth:`empty_pinned`.
            source: must not be changed before the returned event.

        Returns:
            Recorded behind the copy.
        """
        destination.copy_(source, non_blocking=True)
        event = self.new_event()
        event.record()
        return event
