"""Packages that a case needs and this Python lacks, found without importing them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec

TORCH_NPU = "torch_npu"
NPU = {
    "torch": "torch",
    TORCH_NPU: TORCH_NPU,
    "megatron.core": "megatron-core",
    "numpy": "numpy",
    "packaging": "packaging",
    "wrapt": "wrapt",
}
"""Distributions that the case ``npu`` needs, by module; the case installs nothing."""


def absent(modules: Mapping[str, str]) -> list[str]:
    """Return the distributions of missing modules."""
    return [name for module, name in modules.items() if not _there(module)]


def refusal_of_npu() -> str | None:
    """Return why the case ``npu`` cannot run in this environment, and what to install; None if it can.

    torch and torch_npu are never replaced: they must match CANN.
    """
    missing = absent(NPU)
    if not missing:
        return None
    are = "is" if len(missing) == 1 else "are"
    said = f"npu: {', '.join(missing)} {are} not installed for {sys.executable}"
    if TORCH_NPU in missing or "torch" in missing:
        return (
            f"{said}: install the torch_npu that goes with this CANN, with its torch (docs/npu.md, the first "
            "hour on a device), or name the environment that has them: make npu NPU_VENV=DIR"
        )
    pinned = " ".join(f"{name}=={metadata.version(name)}" for name in ("torch", TORCH_NPU))
    keeps = "which keeps torch and torch_npu as they are"
    return f"{said}: python -m pip install -e '.[megatron]' {pinned}, {keeps}"


def _there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False
