"""Launches in a profile: operators that compute or copy, and kernels of compiled code.

Views, allocations and operators that only call others are no launches, whatever torch's profiler names them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

_COMPILED = ("cpp_fused", "triton_")
_NO_WORK = ("autograd::", "torch::", "aten::empty", "aten::new_empty", "aten::resize_", "aten::_unsafe_view")
_NO_WORK += ("aten::lift_fresh",)


def is_launch(event: Any) -> bool:
    """Return whether an event is an operator that computes or copies, or a kernel of compiled code.

    An ATen operator includes the operators that it calls to do its work; an operator of a library counts as
    its parts, if it has any.

    Args:
        event: entry of ``function_events`` of torch's profiler.
    """
    if any(part in event.name for part in _COMPILED):
        return True
    if not _computes(event.name):
        return False
    if any(each.name.startswith("aten::") and _computes(each.name) for each in _ancestors(event)):
        return False
    return event.name.startswith("aten::") or not any(_computes(each.name) for each in _descendants(event))


@cache
def _computes(name: str) -> bool:
    if "::" not in name or name.startswith(_NO_WORK):
        return False
    if not name.startswith("aten::"):
        return True
    schemas = torch._C._jit_get_schemas_for_operator(name)
    if any(out.alias_info and not out.alias_info.is_write for item in schemas for out in item.returns):
        return False  # a view
    own = [item.overload_name for item in schemas if not item.overload_name.endswith("out")]
    full = [f"{name}.{item}" if item else name for item in own]
    return any(
        not torch._C._dispatch_has_kernel_for_dispatch_key(item, "CompositeImplicitAutograd")
        or torch._C._dispatch_has_kernel_for_dispatch_key(item, "CPU")
        for item in full
        if torch._C._dispatch_has_kernel(item)  # others, for example sizes, are TorchScript's only
    )


def _ancestors(event: Any) -> Iterator[Any]:
    while (event := event.cpu_parent) is not None:
        yield event


def _descendants(event: Any) -> Iterator[Any]:
    for child in event.cpu_children:
        yield child
        yield from _descendants(child)
