"""Triton's interpreter, with less to do for each operation of a kernel.

Kernels compute on tiny tiles in tests, so that what the interpreter does around each numpy call takes nearly
all of the time. What it computes and what it checks, overflow of integers included, stay the same; kernels
take about a third of the time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np


def speed_up() -> None:
    """Replace the slowest parts of the interpreter; to be called once, after Triton's import."""
    from triton.language import core, semantic
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return  # releases before 3.6 are written otherwise, and stay as slow as they are
    _search_once_per_launch(interpreter)
    interpreter._get_np_dtype = _dtypes_looked_up(interpreter)
    interpreter._patch_builtin = _called_directly(interpreter)
    core._unwrap_if_constexpr = _unwrapped_by_type(core)
    core.dtype.__eq__ = _equal_to_itself(core.dtype.__eq__)
    core.block_type.__init__ = _shapes_kept(core.block_type)
    core.block_type.with_element_ty = _types_kept(core.block_type)
    core.tensor.__init__ = _sizes_kept(core.tensor.__init__)
    kind = semantic.TritonSemantic
    kind.binary_op_sanitize_overflow_impl = _overflow_found_by_numpy(kind.binary_op_sanitize_overflow_impl)
    kind.broadcast_impl_value = _broadcast_where_shapes_differ(kind.broadcast_impl_value)


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


def _called_directly(interpreter: Any) -> Callable[..., None]:
    """Functions to replace are found and wrapped once, not at every launch.

    The original also makes a second dictionary of the keywords whenever one of them is called.
    """
    wrapped: dict[Any, dict[str, tuple[Any, Any]]] = {}

    def calling(member: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **kwargs)

        return call

    def patch_builtin(owner: Any, builder: Any, scope: Any) -> None:
        if owner not in wrapped:
            members = inspect.getmembers(owner, interpreter.tl.core.is_builtin)
            wrapped[owner] = {name: (member, calling(member)) for name, member in members}
        for name, (member, call) in wrapped[owner].items():
            if getattr(owner, name) is member:  # else it is replaced already
                scope.set_attr(owner, name, call)

    return patch_builtin


def _unwrapped_by_type(core: Any) -> Callable[[Any], Any]:
    """What is nothing to unwrap, nearly everything, is known by its type."""
    original, constant = core._unwrap_if_constexpr, core.constexpr
    plain = {int, float, bool, str, type(None)}
    plain |= {core.tensor, core.dtype, core.block_type, core.pointer_type}

    def unwrap(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is constant else original(value)

    return unwrap


def _equal_to_itself(original: Callable[..., bool]) -> Callable[..., bool]:
    """Types of elements are nearly always the same objects."""

    def equal(self: Any, other: Any) -> bool:
        return self is other or original(self, other)

    return equal


def _broadcast_where_shapes_differ(original: Callable[..., Any]) -> Callable[..., Any]:
    """Operands of one shape are returned as they are."""

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        blocks = one.is_block(), other.is_block()
        if blocks == (False, False) or (blocks == (True, True) and one.shape.values == other.shape.values):
            return lhs, rhs
        return original(self, lhs, rhs)

    return broadcast


def _dtypes_looked_up(interpreter: Any) -> Callable[[Any], Any]:
    """The original builds its table of types at every call."""
    original, found = interpreter._get_np_dtype, {}

    def looked_up(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = original(dtype)
        return found[name]

    return looked_up


def _shapes_kept(kind: Any) -> Callable[..., None]:
    """Types of one element type and shape have the attributes of the first; nobody changes them."""
    original = kind.__init__
    kept: dict[Any, dict[str, Any]] = {}

    def construct(self: Any, element_ty: Any, shape: Any) -> None:
        key = (type(self) is kind, element_ty.name, tuple([getattr(size, "value", size) for size in shape]))
        if key not in kept:
            original(self, element_ty, shape)
            kept[key] = self.__dict__ if type(self) is kind else dict(self.__dict__)
        if type(self) is kind:
            self.__dict__ = kept[key]
        else:  # it gets more of its own
            self.__dict__.update(kept[key])

    return construct


def _types_kept(kind: Any) -> Callable[..., Any]:
    """Types of the same shape and another element type, made once for each."""

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        made = self.__dict__.setdefault("_made", {})
        if scalar_ty.name not in made:
            made[scalar_ty.name] = kind(scalar_ty, self.shape)
        return made[scalar_ty.name]

    return with_element_ty


def _sizes_kept(original: Callable[..., None]) -> Callable[..., None]:
    """Shape and size of a tensor are those of the first tensor of its type."""
    of_scalars: dict[str, Any] = {}

    def construct(self: Any, handle: Any, type: Any) -> None:
        attributes = type.__dict__ if type.is_block() else of_scalars
        if "_sizes" not in attributes:
            original(self, handle, type)
            attributes["_sizes"] = (self.numel, self.shape)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = attributes["_sizes"]

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
