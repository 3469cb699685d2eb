"""Launches in a profile: operators that compute or copy, and kernels of compiled code.

Views, allocations and operators that only call others are none, whatever torch's profiler names them.
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

    An operator of ATen includes the operators that it calls to do its work; an operator of a library counts
    as its parts, if it has any.

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
    if any(out.alias_info and not out.alias_info.is_write for each in schemas for out in each.returns):
        return False  # a view
    own = [each.overload_name for each in schemas if not each.overload_name.endswith("out")]
    full = [f"{name}.{each}" if each else name for each in own]
    return any(
        not torch._C._dispatch_has_kernel_for_dispatch_key(each, "CompositeImplicitAutograd")
        or torch._C._dispatch_has_kernel_for_dispatch_key(each, "CPU")
        for each in full
        if torch._C._dispatch_has_kernel(each)  # others are TorchScript's alone, such as sizes
    )


def _ancestors(event: Any) -> Iterator[Any]:
    while (event := event.cpu_parent) is not None:
        yield event


def _descendants(event: Any) -> Iterator[Any]:
    for child in event.cpu_children:
        yield child
        yield from _descendants(child)
