"""Non-invasive acceleration of Megatron, in particular of DeepSeek Sparse Attention.

Importing this package imports neither torch nor Megatron; the names below are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed_dsa.feature import Conflict, Feature, Flag, Requires
    from mindspeed_dsa.features import register, unregister
    from mindspeed_dsa.patches import MindSpeedDSAError, Patch, PatchError, SettingsError
    from mindspeed_dsa.session import (
        add_arguments,
        apply_environment,
        disable,
        enable,
        enabled,
        finalize,
        report,
        validate,
    )

_HOME = {
    "register": "features",
    "unregister": "features",
    "Conflict": "feature",
    "Feature": "feature",
    "Flag": "feature",
    "Requires": "feature",
    "MindSpeedDSAError": "patches",
    "Patch": "patches",
    "PatchError": "patches",
    "SettingsError": "patches",
    "add_arguments": "session",
    "apply_environment": "session",
    "disable": "session",
    "enable": "session",
    "enabled": "session",
    "finalize": "session",
    "report": "session",
    "validate": "session",
}

_MODULES = ("rl", "transformers", "weights")
"""Modules that need torch, loaded on first attribute access: ``mindspeed_dsa.rl.decode``."""

__all__ = [
    "Conflict",
    "Feature",
    "Flag",
    "MindSpeedDSAError",
    "Patch",
    "PatchError",
    "Requires",
    "SettingsError",
    "add_arguments",
    "apply_environment",
    "disable",
    "enable",
    "enabled",
    "finalize",
    "register",
    "report",
    "unregister",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")  # the import also sets the attribute
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    # Later accesses find the name in the module and do not call __getattr__.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
