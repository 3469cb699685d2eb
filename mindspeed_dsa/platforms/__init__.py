"""Platforms: one small interface over CPU, CUDA and NPU devices. Importing this package imports no torch."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, get_args

from mindspeed_dsa import log
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.platforms import host_pool
from mindspeed_dsa.platforms.base import Event, MemoryFigures, Platform, PlatformName, Stream
from mindspeed_dsa.platforms.cpu import CpuPlatform
from mindspeed_dsa.platforms.cuda import CudaPlatform
from mindspeed_dsa.platforms.npu import NpuPlatform, not_loaded

__all__ = [
    "CHOICES",
    "Event",
    "MemoryFigures",
    "Platform",
    "Stream",
    "current",
    "describe",
    "detect",
    "get",
    "prepare",
]

CHOICES: tuple[str, ...] = ("auto", *get_args(PlatformName))

PLATFORMS: dict[str, Platform] = {p.name: p for p in (CpuPlatform(), CudaPlatform(), NpuPlatform())}
_current: Platform | None = None


def get(name: str) -> Platform:
    """Return the platform of that name.

    Raises:
        SettingsError: no platform has this name.
    """
    try:
        return PLATFORMS[name]
    except KeyError:
        raise SettingsError(f"platform {name!r} is unknown; choose from {', '.join(CHOICES)}") from None


def detect(requested: str = "auto") -> str:
    """Return the name of the platform to run on. Imports torch, but not Megatron.

    torch is imported now so that it is complete when patches are applied.

    Args:
        requested: ``cpu``, ``cuda``, ``npu``, or ``auto`` for the first available one of NPU, GPU and CPU.

    Raises:
        SettingsError: unknown name, no torch, a torch_npu that does not load, or a requested device that is
            not available.
    """
    platform = None if requested == "auto" else get(requested)
    try:
        import torch
    except ModuleNotFoundError as error:
        raise SettingsError("torch is not installed; pip install torch") from error
    except RuntimeError as error:
        if error.__cause__ is None or "torch_npu" not in str(error):
            raise
        # torch loads torch_npu automatically, and fails if torch_npu does.
        raise SettingsError(
            f"torch is not imported, because {not_loaded(error.__cause__)}; to go on without the NPU set "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        ) from error
    if platform is None:
        if find_spec("torch_npu") is not None and _npu_answers():
            return "npu"
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not platform.is_available():
        raise SettingsError(
            f"platform {requested} was asked for, but torch sees no such device; check driver and "
            "visible devices, or use --mindspeed-platform auto (or cpu)"
        )
    return platform.name


def _npu_answers() -> bool:
    """Return whether an NPU is available; log a warning if torch_npu is installed but cannot be loaded."""
    try:
        return PLATFORMS["npu"].is_available()
    except SettingsError as error:
        # Logged on every rank, because other nodes may have working NPUs.
        log.get().warning("%s; going on without the NPU", error, ranks="all")
        return False


def prepare(name: str, needed: bool = True) -> Platform:
    """Prepare a platform and make it the current one.

    Args:
        name: result of :func:`detect`.
        needed: whether any feature is going to be on; if not, torch is left unchanged.

    Raises:
        SettingsError: the device cannot be used.
    """
    global _current
    platform = get(name)
    if needed:
        platform.prepare()
    _current = platform
    return platform


def current() -> Platform:
    """Return the platform chosen by :func:`prepare`, or else the detected one."""
    return _current if _current is not None else get(detect())


# The pool cannot import this package, which imports the pool.
host_pool.pin_with(current)


def describe(name: str) -> dict[str, Any]:
    """Return device facts for ``doctor``."""
    platform = get(name)
    memory = platform.memory()
    return {
        "device": platform.device_name(),
        "backend": platform.backend,
        "memory_total_bytes": memory.total,
        "memory_free_bytes": memory.free,
        **platform.facts(),
    }
