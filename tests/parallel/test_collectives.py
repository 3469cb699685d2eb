"""A reduce-scatter over gloo that moves each byte once gives what torch's gives."""

from __future__ import annotations

import pytest

CASES = "tests.parallel.collective_cases"


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (2, {"dtype": "float32"}),
        (3, {"dtype": "float64", "async_op": True}),
        (4, {"dtype": "bfloat16", "async_op": True}),
        (2, {"dtype": "float32", "op": "MAX"}),
    ],
)
def test_the_sum_is_torchs(pool, ranks, arguments):
    """Of whole numbers, which every order of adding gives exactly; other operations are left to torch."""
    for found in pool.run(f"{CASES}:scattered", ranks, **arguments):
        assert found["ours"].equal(found["theirs"])
        assert found["torch's was called"] == ("op" in arguments)


def test_an_input_that_is_not_contiguous(pool):
    for facts in pool.run(f"{CASES}:scattered_from_columns", 2):
        assert facts == [True, True]


@pytest.mark.parametrize(("rows", "dtype"), [(2, "float32"), (3, "float64")])
def test_what_does_not_fit_is_refused_in_torchs_words(pool, rows, dtype):
    for said in pool.run(f"{CASES}:refused", 2, rows=rows, dtype=dtype):
        assert len(said) == 2
        assert said[0] == said[1]


def test_megatron_uses_it(pool):
    for facts in pool.run(f"{CASES}:used_by_megatron", 2):
        assert facts == [True] * 3
