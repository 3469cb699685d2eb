"""Whether torch_npu's operators can be called, and the limits that several of them share."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

DTYPES = (torch.bfloat16, torch.float16)
# Widths that the manual of npu_sparse_flash_attention_grad and of the sparse loss lists.
TOPK_WIDTHS = tuple(range(1024, 8193, 1024))


def takes_device(device: str) -> bool:
    """Whether tensors on a device of this type go to torch_npu's operators."""
    return device == "npu"


def unavailable(device: str, *names: str) -> str | None:
    """Why the operators cannot be called for tensors on ``device``, or None.

    Args:
        device: what ``torch.device(...).type`` says of the tensors.
        names: operators, such as ``"npu_lightning_indexer"``.
    """
    if not takes_device(device):
        return "it runs on NPU tensors only"
    if find_spec("torch_npu") is None:
        return "the package 'torch_npu' is not installed"
    try:
        torch_npu = import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        return f"torch_npu does not load ({error})"
    missing = [name for name in names if not hasattr(torch.ops.npu, name)]
    if missing:
        return f"torch_npu {torch_npu.__version__} has no {', '.join(missing)}"
    return None


def unsupported_width(operator: str, topk: int, key_length: int) -> str | None:
    """Why an operator whose widths are :data:`TOPK_WIDTHS` cannot take ``topk`` entries per row, or None.

    Rows that list every key may have another width: it is filled up (``Layout.pack_widened``).
    """
    if topk in TOPK_WIDTHS or topk == key_length < TOPK_WIDTHS[-1]:
        return None
    return f"{operator} takes topk {listed(TOPK_WIDTHS)}, or all keys where there are fewer"


def npu_op(name: str) -> Any:
    """The operator ``name`` of torch_npu."""
    return getattr(torch.ops.npu, name)


def listed(sizes: tuple[int, ...]) -> str:
    """``8, 16 or 32``, for messages."""
    *most, last = map(str, sizes)
    return f"{', '.join(most)} or {last}" if most else last
