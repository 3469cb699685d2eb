"""Triton's interpreter, with less to do for each operation of a kernel.

Kernels compute on tiny tiles in tests, so that what the interpreter does around each numpy call takes nearly
all of the time. What it computes and what it checks, overflow of integers included, stay the same; kernels
take about a third of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def speed_up() -> None:
    """Replace the slowest parts of the interpreter; to be called once, after Triton's import."""
    from triton.language import core, semantic
    from triton.runtime import interpreter

    _search_once_per_launch(interpreter)
    interpreter._get_np_dtype = _dtypes_looked_up(interpreter)
    core.block_type.__init__ = _shapes_kept(core.block_type.__init__)
    core.tensor.__init__ = _sizes_kept(core.tensor.__init__)
    kind = semantic.TritonSemantic
    kind.binary_op_sanitize_overflow_impl = _overflow_found_by_numpy(kind.binary_op_sanitize_overflow_impl)


def _search_once_per_launch(interpreter: Any) -> None:
    """Search ``triton.language`` for functions to replace once per launch, not whenever a function is called.

    What the search finds, and puts back after the launch, stays the same.
    """
    patch, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore
    languages = (interpreter.tl, interpreter.tl.core)
    searched: set[tuple[bool, ...]] = set()
    seen: dict[int, tuple[bool, ...]] = {}

    def patch_unless_done(fn: Any) -> Any:
        names = fn.__globals__
        if id(names) not in seen:
            held = {id(each) for each in names.values()}
            seen[id(names)] = tuple(id(each) in held for each in languages)
        visible = seen[id(names)]
        if visible in searched:
            return interpreter._LangPatchScope()
        searched.add(visible)
        return patch(fn)

    def restore_and_forget(self: Any) -> None:
        searched.clear()
        seen.clear()
        restore(self)

    interpreter._patch_lang = patch_unless_done
    interpreter._LangPatchScope.restore = restore_and_forget


def _dtypes_looked_up(interpreter: Any) -> Callable[[Any], Any]:
    """The original builds its table of types at every call."""
    original, found = interpreter._get_np_dtype, {}

    def looked_up(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = original(dtype)
        return found[name]

    return looked_up


def _shapes_kept(original: Callable[..., None]) -> Callable[..., None]:
    """Types of one element type and shape share the attributes of the first; nobody changes them."""
    kept: dict[Any, dict[str, Any]] = {}

    def construct(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, tuple(getattr(size, "value", size) for size in shape))
        if key not in kept:
            original(self, element_ty, shape)
            kept[key] = dict(self.__dict__)
        self.__dict__.update(kept[key])

    return construct


def _sizes_kept(original: Callable[..., None]) -> Callable[..., None]:
    """Shape and size of a tensor are those of the first tensor of its type's shape."""
    kept: dict[Any, tuple[Any, Any]] = {}

    def construct(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in kept:
            original(self, handle, type)
            kept[key] = (self.numel, self.shape)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = kept[key]

    return construct


def _overflow_found_by_numpy(original: Callable[..., None]) -> Callable[..., None]:
    """One operation in 64 bits in place of seven of the kernel's; the original reports what is found."""
    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def sanitize(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        scalar = lhs.type.scalar
        if scalar.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
            return
        wide = operations[binary_op.__name__](lhs.handle.data, rhs.handle.data, dtype=np.int64)
        if wide.min() < scalar.get_int_min_value() or wide.max() > scalar.get_int_max_value():
            original(self, lhs, rhs, binary_op)

    return sanitize
