"""The GPU that Triton kernels are for, their launch, and their compilation ahead of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

HOPPER = 90
# Bytes of shared memory that a program may have, on Hopper and on what is sold for desktops.
LARGE, SMALL = 227 << 10, 99 << 10
# Rows and keys of calls that are only rehearsed. Lengths that are multiples of 16 share their kernels.
REHEARSED_ROWS, REHEARSED_KEYS = 64, 4096


class _Rehearsal(NamedTuple):
    capability: int
    visit: Callable[[Any], object]


_rehearsal: ContextVar[_Rehearsal | None] = ContextVar("_rehearsal", default=None)


class DoesNotCompile(RuntimeError):
    """A kernel cannot run on the GPU it is for; the message names both, and the compiler's reason."""


def capability_of(device: torch.device) -> int:
    """Ten times the compute capability that kernels for tensors on ``device`` are compiled for.

    Inside of :func:`rehearsal` it is the rehearsal's; without a GPU, as in the interpreter, it is Hopper's.
    """
    rehearsed = _rehearsal.get()
    if rehearsed is not None:
        return rehearsed.capability
    if device.type != "cuda" or not torch.cuda.is_available():
        return HOPPER
    major, minor = torch.cuda.get_device_capability(device.index)
    return 10 * major + minor


def shared_memory(device: torch.device) -> int:
    """Bytes that a program on ``device`` may have: :data:`SMALL`, :data:`LARGE` or what is between."""
    capability = capability_of(device)
    if capability in (80, 87):
        return 163 << 10
    return LARGE if capability in (HOPPER, 100, 103) else SMALL


def on_blackwell(device: torch.device) -> bool:
    """Return whether the device has tensor memory; tiles of products then take more shared memory."""
    return capability_of(device) // 10 == 10


@contextmanager
def rehearsal(capability: int, visit: Callable[[Any], object]) -> Iterator[None]:
    """Launches inside compile their kernel, or look it up, and run nothing; tensors may be on ``meta``.

    Args:
        capability: of the GPU that tiles are chosen for, ten times its version.
        visit: called with every kernel that would have been launched.
    """
    token = _rehearsal.set(_Rehearsal(capability, visit))
    try:
        yield
    finally:
        _rehearsal.reset(token)


def on_grid(kernel: Any, *grid: int) -> Callable[..., Any]:
    """``kernel[grid]``: what launches it, or compiles it inside of :func:`rehearsal`."""
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
                # The compiler quotes the source before it says what is wrong with it.
                reason = f"{reason[:100]} ... {reason[-200:]}"
            raise DoesNotCompile(
                f"its {kernel.__name__} does not compile for compute capability {version} ({reason})"
            ) from error

    return compile_only


def load(kernel: Any) -> None:
    """Put a compiled kernel onto the current device, which raises if it has not the memory or the threads."""
    # Asking for what launches it is what loads it.
    assert kernel.run is not None


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without memory, for rehearsals."""
    return torch.empty(shape, dtype=dtype, device="meta")
