"""Packages that a case needs and this Python lacks, in one message; imports none of them."""

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
"""By module what the case ``npu`` needs, for which nothing is installed."""


def absent(modules: Mapping[str, str]) -> list[str]:
    """Return the distributions of modules that are not there."""
    return [name for module, name in modules.items() if not _there(module)]


def refusal_of_npu() -> str | None:
    """Return why the case ``npu`` cannot run in this environment, and what to install; None where it can.

    torch and torch_npu are never to be replaced: they have to go with CANN.
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
    except ModuleNotFoundError:  # the package above it
        return False
