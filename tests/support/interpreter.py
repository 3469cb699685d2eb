"""Triton's interpreter, with less overhead for each operation of a kernel.

Kernels compute on tiny tiles in tests, so the interpreter's overhead around each numpy call takes nearly all
of the time. Results and checks, including integer overflow, stay the same; kernels take about a third of the
time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np


def speed_up() -> None:
    """Replace the slowest parts of the interpreter; call once, after Triton's import."""
    from triton.language import core, semantic
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return  # releases before 3.6 have other code, and stay slow
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
    """Search ``triton.language`` for functions to replace once per launch, not at every call of a function.

    The functions found, and their restoration after the launch, stay the same.
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
    """Find and wrap the functions to replace once, not at every launch.

    The original also copies the keywords whenever one of them is called.
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
    """Decide by type that a value needs no unwrapping, as nearly all values."""
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
    """Compare by identity first: element types are nearly always the same objects."""

    def equal(self: Any, other: Any) -> bool:
        return self is other or original(self, other)

    return equal


def _broadcast_where_shapes_differ(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return operands of the same shape unchanged."""

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        blocks = one.is_block(), other.is_block()
        if blocks == (False, False) or (blocks == (True, True) and one.shape.values == other.shape.values):
            return lhs, rhs
        return original(self, lhs, rhs)

    return broadcast


def _dtypes_looked_up(interpreter: Any) -> Callable[[Any], Any]:
    """Cache types by dtype; the original builds its table at every call."""
    original, found = interpreter._get_np_dtype, {}

    def looked_up(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = original(dtype)
        return found[name]

    return looked_up


def _shapes_kept(kind: Any) -> Callable[..., None]:
    """Copy a type's attributes from the first type of the same element type and shape."""
    original = kind.__init__
    kept: dict[Any, dict[str, Any]] = {}

    def construct(self: Any, element_ty: Any, shape: Any) -> None:
        key = (type(self) is kind, element_ty.name, tuple([getattr(size, "value", size) for size in shape]))
        if key not in kept:
            original(self, element_ty, shape)
            kept[key] = self.__dict__ if type(self) is kind else dict(self.__dict__)
        if type(self) is kind:
            self.__dict__ = kept[key]
        else:  # it gets more attributes later
            self.__dict__.update(kept[key])

    return construct


def _types_kept(kind: Any) -> Callable[..., Any]:
    """Cache types with the same shape and another element type."""

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        made = self.__dict__.setdefault("_made", {})
        if scalar_ty.name not in made:
            made[scalar_ty.name] = kind(scalar_ty, self.shape)
        return made[scalar_ty.name]

    return with_element_ty


def _sizes_kept(original: Callable[..., None]) -> Callable[..., None]:
    """Copy shape and size of a tensor from the first tensor of its type."""
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
    """Check overflow by one 64-bit operation instead of seven of the kernel's; the original reports it."""
    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def sanitize(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        scalar = lhs.type.scalar
        if scalar.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
            return
        # Sums and products of 32-bit numbers fit into 64 bits.
        wide = operations[binary_op.__name__](lhs.handle.data, rhs.handle.data, dtype=np.int64)
        if wide.min() < scalar.get_int_min_value() or wide.max() > scalar.get_int_max_value():
            original(self, lhs, rhs, binary_op)

    return sanitize
