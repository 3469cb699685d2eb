"""Operators of Triton's interpreter, computed at once where their operands need no conversion.

The interpreter goes through a dozen functions for ``a + b``, which check types, make scalars blocks and wrap
results, around a single call of numpy. Here the first use of an operator with two types goes through all of
that, and tells the type of its result; later ones with operands of the same types are numpy's call alone.
What is computed is the same to the bit, and integers that overflow are left to the interpreter to report.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

_ARITHMETIC = {
    "__add__": np.add,
    "__sub__": np.subtract,
    "__mul__": np.multiply,
    "__truediv__": np.divide,
}
_COMPARISONS = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
_OF_BITS = {"__and__": np.bitwise_and, "__or__": np.bitwise_or}
_UFUNCS = {
    **_ARITHMETIC,
    **_COMPARISONS,
    **_OF_BITS,
    "__radd__": np.add,
    "__rsub__": np.subtract,
    "__rmul__": np.multiply,
    "__rtruediv__": np.divide,
}
NAMES = frozenset(_UFUNCS)
"""Of the methods of ``tl.tensor`` that :func:`at_once` takes."""

_FLOATS = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}
_DIVIDED = {"fp32", "fp64"}  # narrower ones are divided in fp32
_INTEGERS = {"int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64}

Operator = Callable[..., Any]


@dataclass(frozen=True)
class _Way:
    """How an operator is computed for two types.

    Attributes:
        compute: data of the result from data of the operands; ``None`` if the interpreter has to.
        type, dtype: of the resulting tensor and of its handle.
    """

    compute: Callable[[Any, Any], Any] | None = None
    type: Any = None
    dtype: Any = None


_BY_THE_INTERPRETER = _Way()


def at_once(interpreter: Any, name: str, original: Operator) -> Operator:
    """The operator ``name`` of ``tl.tensor``, around the interpreter's own.

    Args:
        interpreter: ``triton.runtime.interpreter``.
        name: one of :data:`NAMES`.
        original: of the interpreter; takes the operands.
    """
    tensor, handle_of = interpreter.tl.core.tensor, interpreter.TensorHandle
    ways: dict[tuple[str, Any], _Way] = {}

    def operate(self: Any, other: Any, **keywords: Any) -> Any:
        kind = type(other)
        if kind is tensor:
            key, data = (self.type.name, other.type.name), other.handle.data
        elif kind is int or kind is float:
            key, data = (self.type.name, kind), other
        else:
            return original(self, other, **keywords)
        way = ways.get(key)
        if way is None:
            result = original(self, other, **keywords)
            ways[key] = _way(name, self, other, result)
            return result
        found = None if way.compute is None else way.compute(self.handle.data, data)
        if found is None:
            return original(self, other, **keywords)
        return tensor(handle_of(found, way.dtype), way.type)

    return operate


def _way(name: str, one: Any, other: Any, result: Any) -> _Way:
    """What the first use of an operator says about others with operands of these types."""
    compute = _computation(name, one.dtype, getattr(other, "dtype", type(other)))
    if compute is None:
        return _BY_THE_INTERPRETER
    return _Way(compute, result.type, result.handle.dtype)


def _computation(name: str, one: Any, other: Any) -> Callable[[Any, Any], Any] | None:
    """For a tensor's dtype and another's, or the type of a number."""
    number = isinstance(other, type)
    names = one.name, one.name if number else other.name
    ufunc = _swapped(_UFUNCS[name]) if name.startswith("__r") else _UFUNCS[name]
    if one.is_ptr():
        offsets = name == "__add__" and not number and other.name in ("int32", "int64")
        return _pointers(one.element_ty) if offsets else None
    if names[0] != names[1]:
        return None
    if one.name in _FLOATS and name not in _OF_BITS:
        if "div" in name and one.name not in _DIVIDED:
            return None
        return _with_numbers(ufunc, _FLOATS[one.name]) if number else ufunc
    if one.name == "int1" and name in _OF_BITS and not number:
        return ufunc
    if one.name in _INTEGERS and other is not float and name not in _OF_BITS and "div" not in name:
        if name in _COMPARISONS or one.name == "int64":
            return _within(_INTEGERS[one.name], ufunc) if number else ufunc
        return _without_overflow(_INTEGERS[one.name], ufunc)
    return None


def _swapped(ufunc: Any) -> Callable[..., Any]:
    def swapped(one: Any, other: Any, **keywords: Any) -> Any:
        return ufunc(other, one, **keywords)

    return swapped


def _with_numbers(ufunc: Callable[..., Any], kind: Any) -> Callable[[Any, Any], Any]:
    def compute(data: Any, number: Any) -> Any:
        if number == 0 and math.copysign(1, number) < 0:  # older releases of Triton lose the sign
            return None
        return ufunc(data, kind(number))

    return compute


def _within(kind: Any, ufunc: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Numbers that the type does not have are refused by the interpreter."""
    low, high = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
    return lambda data, number: ufunc(data, kind(number)) if low <= number <= high else None


def _without_overflow(kind: Any, ufunc: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    low, high = int(np.iinfo(kind).min), int(np.iinfo(kind).max)

    def compute(one: Any, other: Any) -> Any:
        if type(other) is int and not low <= other <= high:
            return None
        wide = ufunc(one, other, dtype=np.int64)
        found = wide.astype(kind)
        return None if np.not_equal(wide, found).any() else found

    return compute


def _pointers(element: Any) -> Callable[[Any, Any], Any]:
    size = max(1, element.primitive_bitwidth // 8)
    return lambda pointers, offsets: operator.add(pointers, size * offsets.astype(np.uint64))
