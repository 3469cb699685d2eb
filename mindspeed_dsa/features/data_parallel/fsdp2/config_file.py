"""Parser for the file of ``--fsdp2-config-path``, in MindSpeed's format with its keys.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mindspeed_dsa.patches.errors import SettingsError

_DTYPES = {"bf16": "bf16", "bfloat16": "bf16", "fp32": "fp32", "float32": "fp32"}


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_dtype(value: Any) -> bool:
    return value is None or str(value).removeprefix("torch.") in _DTYPES


def _is_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))


_KEYS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "sharding_size": (lambda value: value is None or (_is_size(value) and value > 0), "a number of ranks"),
    "sub_modules_to_wrap": (_is_names, "a list of package.module.Class"),
    "reshard_after_forward": (
        lambda value: isinstance(value, bool) or (_is_size(value) and value > 1),
        "true, false or a number of ranks",
    ),
    "param_dtype": (_is_dtype, "bf16 or fp32"),
    "reduce_dtype": (_is_dtype, "bf16 or fp32"),
    "output_dtype": (_is_dtype, "bf16 or fp32"),
    "cast_forward_inputs": (lambda value: isinstance(value, bool), "true or false"),
    "ignored_modules": (_is_names, "a list of package.module.Class"),
    "offload_to_cpu": (lambda value: isinstance(value, bool), "true or false"),
    "pin_memory": (lambda value: isinstance(value, bool), "true or false"),
    "num_to_forward_prefetch": (lambda value: value is None or _is_size(value), "a number of units"),
    "recompute_modules": (_is_names, "a list of package.module.Class"),
}


def read_config(path: str) -> dict[str, Any]:
    """Read the fields of ``Options`` that the file sets.

    Raises:
        SettingsError: the file cannot be read, or has unsupported keys or values; the message lists all.
    """
    content = _load(path)
    if problems := list(_problems(content)):
        raise SettingsError(f"--fsdp2-config-path {path}: " + "; ".join(problems))
    fields = {
        "sharding_size": content.get("sharding_size"),
        "prefetch": content.get("num_to_forward_prefetch"),
        "reduce_dtype": _dtype(content.get("reduce_dtype")),
        "param_dtype": _dtype(content.get("param_dtype")),
        "reshard": content.get("reshard_after_forward"),
        "wrapped": tuple(content.get("sub_modules_to_wrap") or ()),
        "ignored": tuple(content.get("ignored_modules") or ()),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _dtype(value: Any) -> str | None:
    return None if value is None else _DTYPES[str(value).removeprefix("torch.")]


def _load(path: str) -> dict[Any, Any]:
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise SettingsError("--fsdp2-config-path needs PyYAML; pip install pyyaml") from error
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SettingsError(
            f"--fsdp2-config-path: there is no file {path}; name one, or omit the flag"
        ) from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"--fsdp2-config-path {path} cannot be read: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"--fsdp2-config-path {path} must hold keys and values, such as sharding_size: 8")
    return content


def _problems(content: dict[Any, Any]) -> Iterator[str]:
    for key, value in content.items():
        if key not in _KEYS:
            yield f"{key} is not one of its keys, {', '.join(_KEYS)}"
        elif not _KEYS[key][0](value):
            yield f"{key} is {value!r}, it must be {_KEYS[key][1]}"
    if content.get("offload_to_cpu") is True:
        yield "offload_to_cpu is not served; omit it"
    if content.get("recompute_modules"):
        yield "recompute_modules is not served; use Megatron's --recompute-granularity or --recompute-modules"
    if content.get("cast_forward_inputs") is False or content.get("output_dtype"):
        yield "Megatron decides on the types of activations; omit cast_forward_inputs and output_dtype"
