"""Permutation of tokens by expert, for every backend available here, against matrices in fp64."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed_dsa.ops import checks
from mindspeed_dsa.ops.backend import BackendUnavailable
from mindspeed_dsa.ops.moe_permute import permute, sort_chunks, unpermute
from mindspeed_dsa.ops.moe_permute.row_map import chunk_rows, of_counted_routing, of_routing, unpack
from tests.ops import permutation_cases as cases

BACKENDS = ("reference", "cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("routing", cases.ROUTINGS, ids=cases.NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_there_and_back(backend, routing, dtype):
    cases.check(backend, routing, dtype, torch.float32, added=routing[0] % 2 == 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("probs", [None, torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("added", [False, True])
def test_weighted_sums(backend, probs, added):
    """Weights may be wider or narrower than the rows, or have the same dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        cases.check(backend, (19, 5, "ragged"), dtype, probs, weighted=True, added=added)


def test_sums_in_several_blocks(monkeypatch):
    monkeypatch.setattr("mindspeed_dsa.ops.moe_permute.backends._BLOCK_BYTES", 4 * 24 * 4)
    for weighted in (False, True):
        cases.check("cpu", (19, 5, "ragged"), torch.bfloat16, torch.float32, weighted=weighted, added=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_in_another_order(backend, dtype):
    cases.check_chunks(backend, dtype)


def test_chunks_that_are_in_order_are_not_copied():
    rows, probs = torch.randn(5, 3), torch.randn(5)
    sorted_rows, sorted_probs = sort_chunks(rows, torch.tensor([2, 3]), torch.arange(2), probs)
    assert sorted_rows is rows
    assert sorted_probs is probs


def test_rows_before_of_chunks():
    # Accelerators gather by these rows, without chunk sizes on the host.
    sizes, order = torch.tensor([3, 0, 5, 1, 0, 4]), torch.tensor([4, 2, 0, 5, 1, 3])
    expected = torch.cat([torch.arange(13).split(sizes.tolist())[chunk] for chunk in order.tolist()])
    assert torch.equal(chunk_rows(sizes, order, 13), expected)


@pytest.mark.parametrize("routing", cases.ROUTINGS, ids=cases.NAMES)
def test_a_map_without_a_search(routing):
    """Row maps built from a known row count equal the ones built by search."""
    chosen = cases.routing_of(*routing)
    counted, expected = of_counted_routing(chosen, int(chosen.sum())), of_routing(chosen, None)
    for part, wanted in zip(counted, expected, strict=True):
        assert part.dtype == torch.int32
        assert torch.equal(part, wanted)


@pytest.mark.parametrize("wrong", [-3, 5])
def test_a_wrong_number_of_rows_stays_in_the_tokens(wrong):
    routing_map = cases.routing_of(19, 5, "ragged")
    rows = int(routing_map.sum()) + wrong
    found = of_counted_routing(routing_map, rows)
    for part, most in ((found.tokens, 19), (found.experts, 5), (found.slots(5), 95)):
        assert part.shape == (rows,)
        assert 0 <= int(part.min()) <= int(part.max()) < most
    assert checks.enabled()
    with pytest.raises(ValueError, match=f"and the caller says {rows}"):
        permute(torch.randn(19, 2), routing_map, rows=rows)


class Written(TorchDispatchMode):
    """Counts the bytes of all results that are not views of an argument."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        if not any(result.alias_info and not result.alias_info.is_write for result in _returns(function)):
            for tensor in tree_leaves(results):
                self.bytes += tensor.nbytes if isinstance(tensor, torch.Tensor) else 0
        return results


def _returns(function):
    return function._schema.returns


def test_every_row_is_written_once():
    """Each direction writes every row once, plus integers."""
    routing_map = cases.routing_of(64, 8, "top 2")
    tokens = torch.randn(64, 512, requires_grad=True)
    with Written() as forward:
        moved = permute(tokens, routing_map)
        total = unpermute(moved.tokens, moved.row_map, 64)
    integers = 64 * 2 * 200
    # 128 rows out and 64 tokens back, 512 x 4 bytes = 2048 bytes each.
    assert forward.bytes < (128 + 64) * 2048 + integers
    upstream = torch.randn_like(total)
    with Written() as backward:
        torch.autograd.grad(total, tokens, upstream)
    assert backward.bytes < (128 + 64) * 2048 + integers


def test_rows_that_the_map_does_not_have_are_refused():
    routing_map = cases.routing_of(13, 4, "top 2")
    tokens = torch.randn(13, 8)
    with pytest.raises(ValueError, match="sends its 13 tokens to 26 rows in all, and the caller says 27"):
        permute(tokens, routing_map, rows=27)
    with pytest.raises(ValueError, match="every token goes to 3 experts, and the map says otherwise"):
        permute(tokens, routing_map, topk=3)
    moved = permute(tokens, routing_map, rows=26, topk=2)
    with pytest.raises(ValueError, match="not that of 12 tokens in 26 rows"):
        unpermute(moved.tokens, moved.row_map, 12)


def test_wrong_operands_are_refused():
    routing_map, tokens = cases.routing_of(13, 4, "top 2"), torch.randn(13, 8)
    moved = permute(tokens, routing_map)
    for problem, call in {
        r"routing_map must be bool on cpu, got torch.int64": lambda: permute(tokens, routing_map.long()),
        r"routing_map must be \[13, experts\]": lambda: permute(tokens, routing_map[:5]),
        r"probs must be \[13, 4\]": lambda: permute(tokens, routing_map, torch.randn(13, 3)),
        r"tokens must be floating point": lambda: permute(tokens.int(), routing_map),
        r"row_map must be what permute returned": lambda: unpermute(tokens, routing_map[0], 13),
        r"addend must be \[13, 8\]": lambda: unpermute(
            moved.tokens, moved.row_map, 13, addend=torch.randn(13, 7)
        ),
    }.items():
        with pytest.raises(ValueError, match=problem):
            call()
    with pytest.raises(BackendUnavailable, match="it runs on NPU tensors only"):
        permute(tokens, routing_map, backend="npu")


def test_a_map_without_offsets_is_that_of_equally_many_rows():
    # The NPU backend makes such maps, and any other backend may have to read them.
    chosen, tokens = cases.routing_of(13, 4, "top 2"), torch.randn(13, 8)
    moved = permute(tokens, chosen)
    short = unpack(moved.row_map, 13, 26)._replace(offsets=None).pack()
    expected = unpermute(moved.tokens, moved.row_map, 13)
    for backend in BACKENDS:
        assert torch.equal(unpermute(moved.tokens, short, 13, backend=backend), expected)
