"""The interpreter of Gluon fails where a kernel for Hopper lacks a wait, an arrival or a fence."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from copy import deepcopy
from importlib import import_module
from typing import Any

import pytest
import torch

from tests.ops.triton_backend import common, hopper

if not (hopper.HAS_GLUON and common.interpreted()):
    pytest.skip("the interpreter runs on the CPU, with a Triton that has Gluon", allow_module_level=True)

from triton.experimental.gluon._runtime import GluonJITFunction

from tests.ops import gluon_on_cpu

FOLDER = "mindspeed_dsa.ops.sparse_flash_attention"
REMOVED = {
    "mbarrier.wait",
    "mbarrier.arrive",
    "async_copy.mbarrier_arrive",
    "fence_async_shared",
    "group_barrier",
    "warpgroup_mma_wait",
}
# What the interpreter does not see: a partition is one thread, and has no warps that wait for each other.
UNSEEN = {"group_barrier()"}
# Not needed: the group then waits for copies that the same group began later. Copies end in their order.
NOT_NEEDED = {
    "attend: mbarrier.wait(query_full, 0)",
    "attend_tiles: mbarrier.wait(query_full, 0)",
    "sum_tiles: mbarrier.wait(query_full, 0)",
    "score_tiles: mbarrier.wait(row_full, 0)",
    "multiply_tiles: mbarrier.wait(key_full, tile & 1)",
}

Call = Callable[[], tuple[torch.Tensor, ...]]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(1, *shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


def row_of(heads: int, topk: int) -> tuple[torch.Tensor, ...]:
    """Return queries of one row, keys, indices and their number."""
    order = torch.randperm(topk + 9, generator=torch.Generator().manual_seed(0))
    indices = order[:topk].int().view(1, 1, topk)
    return normal(1, heads, 576), normal(topk + 9, 576), indices, torch.tensor([topk], dtype=torch.int32)


def forward_of(heads: int, topk: int) -> Call:
    query, keys, indices, lengths = row_of(heads, topk)

    def call() -> tuple[torch.Tensor, ...]:
        out, lse = torch.empty(1, 1, heads, 512, dtype=torch.bfloat16), torch.empty(1, 1, heads)
        hopper.forward(query, keys, indices, lengths, 0.1, out, lse)
        return out, lse

    return call


def sum_of(heads: int, topk: int) -> Call:
    query, keys, indices, lengths = row_of(heads, topk)

    def call() -> tuple[torch.Tensor, ...]:
        summed = torch.empty(1, 1, topk)
        hopper.attention_sum(query, keys, indices, lengths, torch.full((1, 1, heads), 3.0), 0.1, summed)
        return (summed,)

    return call


def backward_of(heads: int, topk: int, by_rows: bool) -> Call:
    query, keys, indices, lengths = row_of(heads, topk)
    per_head = torch.full((1, 1, heads), 3.0)
    inputs = query, keys, normal(1, heads, 512), per_head, per_head

    def call() -> tuple[torch.Tensor, ...]:
        grad_keys, summed = torch.zeros(topk + 9, 576), torch.zeros(1, 1, topk)
        if by_rows:
            results = (torch.empty_like(query), grad_keys, summed)
            hopper.gradients_of_rows(inputs, results, indices[0], lengths, range(1), 0.1, False)
            return results
        tiles = torch.arange(-(-topk // 64))
        # One row alone, whose entries keep their places.
        shared = indices[0], torch.arange(topk).view(1, topk), tiles * 8 + 1, torch.tensor([0, len(tiles)])
        stored = -(-heads // hopper.backward_heads(heads)) * hopper.backward_heads(heads)
        grad_scores = torch.zeros(1, topk, stored, dtype=torch.bfloat16)
        hopper.gradients_of_keys(inputs, (grad_scores, summed, grad_keys), shared, 0, 0.1, True)
        return grad_scores, summed, grad_keys

    return call


# Each group of warps takes at least two tiles, the last one partly empty.
CASES = {
    "hopper_few_heads": lambda: forward_of(16, 257),
    "hopper_backward_few_heads": lambda: backward_of(17, 257, True),
    "hopper_forward": lambda: forward_of(33, 257),
    "hopper_attention_sum": lambda: sum_of(17, 257),
    "hopper_backward": lambda: backward_of(72, 130, False),
    "hopper_backward_rows": lambda: backward_of(33, 200, True),
}
QUICK = 1


def without_each(function: Any) -> Iterator[tuple[str, ast.Module]]:
    """Yield a function's definition without each of the statements in ``REMOVED``, and the statement."""
    whole = ast.parse(textwrap.dedent(inspect.getsource(function.fn)))
    whole.body[0].decorator_list = []  # type: ignore[attr-defined]

    def removable(tree: ast.Module) -> list[tuple[list[ast.stmt], int]]:
        return [
            (block, place)
            for node in ast.walk(tree)
            for block in (getattr(node, "body", []), getattr(node, "orelse", []))
            if isinstance(block, list)
            for place, each in enumerate(block)
            if isinstance(each, (ast.Expr, ast.Assign))
            and isinstance(each.value, ast.Call)
            and ast.unparse(each.value.func) in REMOVED
        ]

    for number, (block, place) in enumerate(removable(whole)):
        tree = deepcopy(whole)
        others, _ = removable(tree)[number]
        others[place] = ast.Pass(lineno=1, col_offset=0)
        yield ast.unparse(block[place]), tree


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if number < QUICK else pytest.mark.full)
        for number, name in enumerate(CASES)
    ],
)
def test_a_kernel_fails_without_any_of_its_waits_arrivals_and_fences(name, hopper_kernels):
    torch.use_deterministic_algorithms(False)
    module, call = import_module(f"{FOLDER}.{name}"), CASES[name]()
    expected = call()
    seen, missed = 0, set()
    for function in list(vars(module).values()):
        if not isinstance(function, GluonJITFunction) or function.fn.__module__ != module.__name__:
            continue
        for statement, definition in without_each(function):
            with gluon_on_cpu.changed(function, definition):
                if as_expected(call, expected):
                    missed.add(f"{function.fn.__name__}: {statement}")
                else:
                    seen += 1
    assert seen > 5
    not_needed = {each for each in NOT_NEEDED if each.partition(": ")[0] in vars(module)}
    assert {each for each in missed if each.partition(": ")[2] not in UNSEEN} == not_needed
    for value, other in zip(call(), expected, strict=True):
        assert torch.equal(value, other)


def as_expected(call: Call, expected: tuple[torch.Tensor, ...]) -> bool:
    """Return whether a call gives the expected numbers, instead of others or an error."""
    try:
        found = call()
    except (AssertionError, RuntimeError, TypeError, AttributeError):
        return False
    return all(torch.equal(value, other) for value, other in zip(found, expected, strict=True))
