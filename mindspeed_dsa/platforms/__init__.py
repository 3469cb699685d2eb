"""Platforms: the differences between devices, behind one small interface. Importing this loads no torch."""

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
    """The platform of that name.

    Raises:
        SettingsError: there is none.
    """
    try:
        return PLATFORMS[name]
    except KeyError:
        raise SettingsError(f"platform {name!r} is unknown; choose from {', '.join(CHOICES)}") from None


def detect(requested: str = "auto") -> str:
    """The platform to run on; imports torch (so that it is complete when patches arrive), no Megatron.

    Args:
        requested: ``cpu``, ``cuda``, ``npu``, or ``auto`` for the first of NPU, GPU and CPU that is there.

    Raises:
        SettingsError: unknown name, no torch or one whose torch_npu does not load, or a device that was
            asked for and is not there.
    """
    platform = None if requested == "auto" else get(requested)
    try:
        import torch
    except ModuleNotFoundError as error:
        raise SettingsError("torch is not installed; pip install torch") from error
    except RuntimeError as error:
        if error.__cause__ is None or "torch_npu" not in str(error):
            raise
        # torch loads torch_npu by itself, and with it fails.
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
    """Return whether an NPU is there; a torch_npu that cannot be loaded is reported, never skipped."""
    try:
        return PLATFORMS["npu"].is_available()
    except SettingsError as error:
        # On every rank: another node's NPUs may be well.
        log.get().warning("%s; going on without the NPU", error, ranks="all")
        return False


def prepare(name: str, needed: bool = True) -> Platform:
    """Make a platform the current one.

    Args:
        name: what :func:`detect` returned.
        needed: whether anything is going to be switched on; if not, nothing in torch is touched.

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
    """The platform chosen by :func:`prepare`, else the detected one."""
    return _current if _current is not None else get(detect())


host_pool.pin_with(current)


def describe(name: str) -> dict[str, Any]:
    """Device facts for ``doctor``."""
    platform = get(name)
    memory = platform.memory()
    return {
        "device": platform.device_name(),
        "backend": platform.backend,
        "memory_total_bytes": memory.total,
        "memory_free_bytes": memory.free,
        **platform.facts(),
    }
