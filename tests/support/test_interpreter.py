"""Operators computed at once give what Triton's interpreter gives, bit by bit, or fail as it does."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton is not installed; it comes with the extra 'test' on Linux")
from triton import language as tl
from triton.runtime import interpreter

from tests.support import interpreter_operators

TYPES = {
    tl.float16: np.float16,
    tl.float32: np.float32,
    tl.float64: np.float64,
    tl.bfloat16: np.uint16,
    tl.int1: np.bool_,
    tl.int8: np.int8,
    tl.int32: np.int32,
    tl.int64: np.int64,
    tl.uint32: np.uint32,
}
POINTER = (tl.pointer_type(tl.float32), np.uint64)
KINDS = [*TYPES.items(), POINTER]
SHAPES = [((2, 4), (2, 4)), ((2, 1), (1, 4)), ((4,), (2, 4)), ((), (2, 4)), ((2, 4), ()), ((), ())]
NUMBERS = [0, 3, -5, 127, 128, 2**31 - 1, 2**31, 2**40, 2.5, -0.0, 1e-30, float("inf")]


@pytest.fixture
def originals():
    """The interpreter's own operators, as kernels find them while they run."""
    methods = {name: getattr(tl.tensor, name) for name in sorted(interpreter_operators.NAMES)}
    scope = interpreter._patch_lang(test_they_are_the_interpreters)
    yield {
        name: functools.partial(method, _semantic=interpreter.interpreter_semantic)
        for name, method in methods.items()
    }
    scope.restore()


def tensor(kind, shape, seed):
    generator = np.random.default_rng(seed)
    dtype, kind = kind
    if dtype.is_floating() and not dtype.is_bf16():
        data = generator.standard_normal(shape or 1).astype(kind)
    else:  # the second time large ones, which overflow
        high = 2 if kind is np.bool_ else [7, min(np.iinfo(kind).max, 2**62)][seed % 2]
        low = -high if np.issubdtype(kind, np.signedinteger) else 0
        data = generator.integers(low, high, shape or 1).astype(kind)
    return tl.tensor(
        interpreter.TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if shape else dtype
    )


def outcome(operate, *operands):
    try:
        found = operate(*operands)
    except Exception as error:
        return type(error)
    data = found.handle.data
    return str(found.type), found.shape, str(found.handle.dtype), data.dtype, data.shape, data.tobytes()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", sorted(interpreter_operators.NAMES))
def test_they_are_the_interpreters(originals, name):
    original, slow = originals[name], []

    def counted(*operands):
        slow.append(operands)
        return original(*operands)

    operate = interpreter_operators.at_once(interpreter, name, counted)

    def compare(one, other):
        assert outcome(operate, one, other) == outcome(original, one, other), (one.type, other)

    for one, other in itertools.product(KINDS, KINDS):
        for left, right in SHAPES if one in (other, POINTER) else SHAPES[2:3]:
            for seed in range(2):  # the second of them is computed at once, if any is
                compare(tensor(one, left, seed), tensor(other, right, seed + 4))
    for kind, number, shape in itertools.product(KINDS, NUMBERS, [(2, 4), ()]):
        compare(tensor(kind, shape, 0), number)
    kind = (tl.int1, np.bool_) if name in ("__and__", "__or__") else (tl.float32, np.float32)
    before = len(slow)
    operate(tensor(kind, (2, 4), 0), tensor(kind, (2, 4), 1))
    assert len(slow) == before
