"""Packs told by their lengths: what every operator makes of them, and which it refuses.

Expected are the same operators with the packs told by starts and ends, and rows of one document alone.
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
"""Operators that take starts and ends as well, by the name in their messages."""
OPERATORS = [
    *BY_RANGES.items(),
    (
        "sparse_flash_attention",
        lambda form: dsa.sparse_flash_attention(QUERY, KEY[:, :, 0], SELECTED, 0.3, value_dim=4, form=form),
    ),
    (
        "indexer_kl_loss",
        lambda form: dsa.indexer_kl_loss(*INDEX, QUERY, KEY[:, :, 0], SELECTED, 0.3, form=form),
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
