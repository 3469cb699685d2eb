"""Availability of torch_npu's operators, and the limits that several of them share."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from mindspeed_dsa import log
from mindspeed_dsa.platforms.npu_operators import BY_NAME, PRODUCTS, UNKNOWN, Product, needs, product_of

_log = log.get("ops")
DTYPES = (torch.bfloat16, torch.float16)
# topk widths that the manual lists for npu_sparse_flash_attention_grad and for the sparse loss.
TOPK_WIDTHS = tuple(range(1024, 8193, 1024))
# CANN's own operator libraries; newer releases split them by field.
_LIBRARIES = (
    *(f"libopapi_{field}.so" for field in ("math", "nn", "cv", "transformer", "legacy")),
    "libopapi.so",
)


def takes_device(device: str) -> bool:
    """Return whether the device type is ``npu``."""
    return device == "npu"


def unavailable(device: str, *names: str) -> str | None:
    """Return why the operators cannot be called for tensors on ``device``, or None.

    Args:
        device: type of the tensors' ``torch.device``.
        names: names of operators, such as ``"npu_lightning_indexer"``.
    """
    if not takes_device(device):
        return "it runs on NPU tensors only"
    if find_spec("torch_npu") is None:
        return "the package 'torch_npu' is not installed"
    try:
        torch_npu = import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        return f"torch_npu does not load ({error})"
    for name in names:
        if not hasattr(torch.ops.npu, name):
            return f"torch_npu {torch_npu.__version__} has no {name}; {needs(name)}"
        if absent := absent_symbols(name):
            return (
                f"CANN's operator library has no {' or '.join(absent)}, which torch_npu "
                f"{torch_npu.__version__} calls; {needs(name)}"
            )
    return None


@cache
def absent_symbols(name: str) -> tuple[str, ...]:
    """Return an operator's CANN symbols if CANN provides none of them, else an empty tuple.

    The tuple is also empty if CANN cannot be inspected. torch_npu resolves CANN symbols lazily, so a
    torch_npu that is newer than CANN has operators that raise when they are called.
    """
    wanted = BY_NAME[name].symbols if name in BY_NAME else ()
    # An operator needs only one of its symbols.
    libraries = operator_libraries()
    if any(hasattr(library, f"{symbol}GetWorkspaceSize") for library in libraries for symbol in wanted):
        return ()
    return wanted if libraries else ()


@cache
def operator_libraries() -> tuple[ctypes.CDLL, ...]:
    """Return the libraries in which torch_npu looks up CANN's operators, user libraries first.

    Empty if CANN's own libraries cannot be loaded, as in an environment without CANN.
    """
    cann = [library for name in _LIBRARIES if (library := _loaded(name)) is not None]
    if not cann:
        return ()
    folders = [*filter(None, os.environ.get("ASCEND_CUSTOM_OPP_PATH", "").split(":"))]
    if base := os.environ.get("ASCEND_OPP_PATH"):
        folders += [str(vendor) for vendor in Path(base, "vendors").glob("*")]
    of_users = (_loaded(f"{folder}/op_api/lib/libcust_opapi.so") for folder in folders)
    return (*filter(None, of_users), *cann)


def _loaded(library: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(library)
    except OSError:
        return None


@cache
def product() -> Product:
    """Return the limits of this NPU model; an unknown model gets the narrowest limits and one warning."""
    try:
        name = str(import_module("torch_npu").npu.get_device_name())
    except Exception as error:  # torch_npu without a device raises a TypeError, among others
        name = f"({error!r})"
    detected = product_of(name)
    if detected is UNKNOWN:
        _log.warning(
            "npu: the device's name %s is none of %s; operators take the narrowest limits of these",
            name,
            ", ".join(each.name for each in PRODUCTS),
            once=True,
        )
    return detected


def unsupported_width(operator: str, topk: int, key_length: int) -> str | None:
    """Return why an operator cannot take ``topk`` entries per row, or None.

    Operators support the widths :data:`TOPK_WIDTHS`. If every row lists all its visible keys, other widths
    work too, because rows are padded (``Layout.pack_widened``).
    """
    if topk in TOPK_WIDTHS or topk == key_length < TOPK_WIDTHS[-1]:
        return None
    return f"{operator} takes topk {listed(TOPK_WIDTHS)}, or all keys where there are fewer"


def npu_op(name: str) -> Any:
    """Return torch_npu's operator ``name``."""
    return getattr(torch.ops.npu, name)


def listed(sizes: tuple[int, ...]) -> str:
    """Format sizes for messages, such as ``8, 16 or 32``."""
    *most, last = map(str, sizes)
    return f"{', '.join(most)} or {last}" if most else last
