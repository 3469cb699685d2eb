"""Packed sequences given by their lengths (``RowForm``) or bounds (``cu_seqlens``), for every operator.

The expected results come from the same operators with starts and ends, or from one document at a time.
"""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops import dsa
from tests.ops.random_inputs import indexer_inputs, packed_ranges

BATCH, ROWS, TOPK, HEADS, DIM = 2, 8, 4, 2, 8
CPU = torch.device("cpu")
GENERATOR = torch.Generator().manual_seed(0)
QUERY, KEY = torch.randn(2, BATCH, ROWS, HEADS, DIM, generator=GENERATOR)
INDEX = indexer_inputs(BATCH, ROWS)
SELECTED = dsa.lightning_indexer(*INDEX, TOPK).topk_indices

BY_RANGES = {
    "lightning_indexer": lambda **rows: dsa.lightning_indexer(*INDEX, TOPK, **rows).topk_indices,
    "quantised_indexer": lambda **rows: dsa.quantised_indexer(*INDEX, TOPK, **rows),
    "indexer_kl_loss": lambda **rows: dsa.dense_indexer_kl_loss(*INDEX, QUERY, KEY, 0.3, **rows),
    "deepseek_sparse_attention": lambda **rows: (
        dsa.deepseek_sparse_attention(QUERY, KEY, KEY, *INDEX, topk=TOPK, softmax_scale=0.3, **rows).out
    ),
}
"""Operators that also take starts and ends, by the name in their messages."""
OPERATORS = [
    *BY_RANGES.items(),
    (
        "sparse_flash_attention",
        lambda **rows: dsa.sparse_flash_attention(QUERY, KEY[:, :, 0], SELECTED, 0.3, value_dim=4, **rows),
    ),
    (
        "indexer_kl_loss",
        lambda **rows: dsa.indexer_kl_loss(*INDEX, QUERY, KEY[:, :, 0], SELECTED, 0.3, **rows),
    ),
]

OTHERS = {
    "a document is cut by the end of a row": (5, 5, 6),
    "one document of all rows": (16,),
    "too few rows": (8,),
    "too many rows": (8, 9),
    "an empty document": (8, 0, 8),
    "a negative length": (8, 8, -8, 8),
    "no document": (),
}


@pytest.mark.parametrize("lengths", OTHERS.values(), ids=OTHERS)
def test_lengths_that_do_not_fill_the_rows_are_refused_by_whoever_takes_them(lengths):
    form = dsa.RowForm(lengths)
    for name, operator in OPERATORS:
        with pytest.raises(ValueError, match=f"{name}: sequences of .* do not fill 2 times 8 rows"):
            operator(form=form)
    with pytest.raises(ValueError, match=r"RowForm\.ranges: sequences of .* do not fill 2 times 8 rows"):
        form.ranges(BATCH, ROWS, ROWS, CPU)


@pytest.mark.parametrize(
    "lengths", [[8, 8], (8.0, 8.0), "ab", 16, ((8,), (8,)), torch.tensor([8, 8])], ids=str
)
def test_what_is_no_tuple_of_lengths_is_refused_where_it_is_made(lengths):
    with pytest.raises(ValueError, match="RowForm: sequences is a tuple of integers"):
        dsa.RowForm(lengths)


@pytest.mark.parametrize("name", BY_RANGES)
def test_a_form_alone_says_starts_and_ends(name):
    operator = BY_RANGES[name]
    starts, ends = torch.stack([torch.stack(packed_ranges(*of)) for of in ((3, 5), (8,))], dim=1)
    assert torch.equal(operator(form=dsa.RowForm((3, 5, 8))), operator(starts=starts, ends=ends))
    assert torch.equal(operator(form=dsa.RowForm((8, 8))), operator())
    assert not torch.equal(operator(form=dsa.RowForm((3, 5, 8))), operator())


def test_a_form_alone_says_which_of_more_keys_rows_see():
    query, _, weights = (x[:, -3:] for x in INDEX)
    found = dsa.lightning_indexer(query, INDEX.key, weights, TOPK, form=dsa.RowForm()).topk_indices
    assert torch.equal(found, SELECTED[:, -3:])


# -- cu_seqlens --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BY_RANGES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bounds_of_sequences_say_what_their_lengths_do(name, dtype):
    """Empty sequences, with which frameworks pad ``cu_seqlens``, change nothing."""
    operator = BY_RANGES[name]
    bounds = torch.tensor([0, 3, 3, 8, 16, 16], dtype=dtype)
    assert torch.equal(operator(cu_seqlens=bounds), operator(form=dsa.RowForm((3, 5, 8))))
    assert torch.equal(operator(cu_seqlens=torch.tensor([0, 8, 16])), operator())
    assert not torch.equal(operator(cu_seqlens=bounds), operator())


def test_operators_on_selected_keys_take_bounds_too():
    # Indices already imply the form. Passing it avoids a read from the device.
    bounds = torch.tensor([0, 8, 16], dtype=torch.int32)
    for name, operator in OPERATORS[len(BY_RANGES) :]:
        with_bounds, plain = operator(cu_seqlens=bounds), operator()
        same = [with_bounds, plain] if isinstance(plain, torch.Tensor) else [with_bounds.out, plain.out]
        assert torch.equal(*same), name


def test_the_module_takes_bounds():
    module = dsa.DeepSeekSparseAttention(
        dsa.Indexer(12, heads=4, head_dim=8, rope_dim=0), topk=2, softmax_scale=0.3
    )
    hidden = torch.randn(BATCH, ROWS, 12, generator=torch.Generator().manual_seed(1))
    by_bounds = module(hidden, QUERY, KEY, KEY, cu_seqlens=torch.tensor([0, 3, 8, 16], dtype=torch.int32))
    by_lengths = module(hidden, QUERY, KEY, KEY, form=dsa.RowForm((3, 5, 8)))
    assert torch.equal(by_bounds.topk_indices, by_lengths.topk_indices)
    assert torch.equal(by_bounds.loss, by_lengths.loss)


WRONG_BOUNDS = {
    "a list": ([0, 8, 16], "cu_seqlens is a tensor, .*got list"),
    "floats": (torch.tensor([0.0, 8, 16]), r"must be \[sequences \+ 1\] int32, got \[3\] torch.float32"),
    "two axes": (torch.tensor([[0, 8, 16]]), r"must be \[sequences \+ 1\] int32, got \[1, 3\]"),
    "nothing": (torch.tensor([], dtype=torch.int32), r"must be \[sequences \+ 1\] int32, got \[0\]"),
    "lengths": (torch.tensor([8, 8]), "begins with 0, got 8"),
    "descending": (torch.tensor([0, 9, 8, 16]), "entry 2, 8, is below the one before it"),
    "no bound behind the padding": (torch.tensor([0, 8, 12]), "ends at 12, and 2 times 8 rows at 16"),
    "of one row of the batch": (torch.tensor([0, 3, 8]), "ends at 8, and 2 times 8 rows at 16"),
    "too far": (torch.tensor([0, 8, 17]), "ends at 17, and 2 times 8 rows at 16"),
    "cut by the end of a row": (torch.tensor([0, 5, 10, 16]), "a sequence in two of the 2 rows"),
}


@pytest.mark.parametrize(("bounds", "message"), WRONG_BOUNDS.values(), ids=WRONG_BOUNDS)
def test_bounds_that_do_not_fit_are_refused_in_words(bounds, message):
    for name, operator in OPERATORS:
        with pytest.raises(ValueError, match=f"{name}: cu_seqlens .*{message.removeprefix('cu_seqlens ')}"):
            operator(cu_seqlens=bounds)


def test_bounds_beside_another_form_are_refused():
    bounds, starts = torch.tensor([0, 8, 16]), torch.zeros(ROWS, dtype=torch.int32)
    for name, operator in OPERATORS:
        with pytest.raises(ValueError, match=f"{name}: .*pass neither form nor starts and ends beside it"):
            operator(cu_seqlens=bounds, form=dsa.RowForm((8, 8)))
    for operator in BY_RANGES.values():
        with pytest.raises(ValueError, match="pass neither form nor starts and ends"):
            operator(cu_seqlens=bounds, starts=starts)


def test_bounds_of_fewer_rows_than_keys_are_refused():
    query, _, weights = (x[:, -3:] for x in INDEX)
    with pytest.raises(ValueError, match="bounds rows and keys alike, got 3 rows and 8 keys; pass ends"):
        dsa.lightning_indexer(query, INDEX.key, weights, TOPK, cu_seqlens=torch.tensor([0, 3, 6]))


def test_bounds_become_a_form_once_for_all_layers():
    assert dsa.RowForm.of_cu_seqlens(torch.tensor([0, 3, 3, 8, 16])) == dsa.RowForm((3, 5, 8))
    assert dsa.RowForm.of_cu_seqlens(torch.tensor([0])) == dsa.RowForm()
    with pytest.raises(ValueError, match=r"RowForm\.of_cu_seqlens: cu_seqlens begins with 0"):
        dsa.RowForm.of_cu_seqlens(torch.tensor([3, 8]))


def test_bounds_of_no_rows_are_those_of_an_empty_batch():
    empty = [x[:0] for x in INDEX]
    found = dsa.lightning_indexer(*empty, TOPK, cu_seqlens=torch.tensor([0], dtype=torch.int32))
    assert found.topk_indices.shape == (0, ROWS, TOPK)
