"""Launch of Triton kernels, their target GPU, and compilation without a launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

HOPPER = 90
# Bytes of shared memory per program, on Hopper and on desktop GPUs.
LARGE, SMALL = 227 << 10, 99 << 10
# Rows and keys of rehearsed calls. Kernels are specialized on divisibility by 16, so other such lengths share
# them.
REHEARSED_ROWS, REHEARSED_KEYS = 64, 4096


class _Rehearsal(NamedTuple):
    capability: int
    visit: Callable[[Any], object]


_rehearsal: ContextVar[_Rehearsal | None] = ContextVar("_rehearsal", default=None)


class DoesNotCompile(RuntimeError):
    """A kernel cannot run on its target GPU; the message names both, and the compiler's reason."""


def capability_of(device: torch.device) -> int:
    """Return ten times the compute capability for which kernels on ``device`` are compiled.

    Inside :func:`rehearsal` this is the capability passed to it. Without a GPU, as in the interpreter, it is
    Hopper's.
    """
    rehearsed = _rehearsal.get()
    if rehearsed is not None:
        return rehearsed.capability
    if device.type != "cuda" or not torch.cuda.is_available():
        return HOPPER
    major, minor = torch.cuda.get_device_capability(device.index)
    return 10 * major + minor


def shared_memory(device: torch.device) -> int:
    """Return the available shared memory per program in bytes, from :data:`SMALL` to :data:`LARGE`."""
    capability = capability_of(device)
    if capability in (80, 87):
        return 163 << 10
    return LARGE if capability in (HOPPER, 100, 103) else SMALL


def on_blackwell(device: torch.device) -> bool:
    """Return whether the device has tensor memory, which makes product tiles need more shared memory."""
    return capability_of(device) // 10 == 10


@contextmanager
def rehearsal(capability: int, visit: Callable[[Any], object]) -> Iterator[None]:
    """Only compile the kernels that the block would launch, or look them up in the cache.

    Tensors may be meta tensors.

    Args:
        capability: compute capability, times ten, of the GPU whose tile sizes are used.
        visit: callback for every kernel that would have been launched.
    """
    token = _rehearsal.set(_Rehearsal(capability, visit))
    try:
        yield
    finally:
        _rehearsal.reset(token)


def on_grid(kernel: Any, *grid: int) -> Callable[..., Any]:
    """Return ``kernel[grid]``; inside :func:`rehearsal`, a function that only compiles the kernel."""
    rehearsed = _rehearsal.get()
    if rehearsed is None:
        launch: Callable[..., Any] = kernel[grid]
        return launch

    def compile_only(*args: Any, **constants: Any) -> None:
        try:
            rehearsed.visit(kernel.warmup(*args, grid=grid, **constants))
        except Exception as error:
            # Errors of the compiler, the assembler, the linker and the driver have no type in common.
            version = f"{rehearsed.capability // 10}.{rehearsed.capability % 10}"
            reason = " ".join(str(error).split())
            if len(reason) > 300:
                # The compiler quotes the source before the actual error, which is at the end.
                reason = f"{reason[:100]} ... {reason[-200:]}"
            raise DoesNotCompile(
                f"its {kernel.__name__} does not compile for compute capability {version} ({reason})"
            ) from error

    return compile_only


def load(kernel: Any) -> None:
    """Load a compiled kernel onto the current device; raise if it exceeds the device's resources."""
    # Accessing `run` loads the kernel.
    assert kernel.run is not None


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an empty meta tensor, for :func:`rehearsal`."""
    return torch.empty(shape, dtype=dtype, device="meta")
