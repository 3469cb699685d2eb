"""Scores and selection in one launch: the bits of two launches for each slab, and when it is taken."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_dsa.ops.lightning_indexer import lightning_indexer
from mindspeed_dsa.ops.quantised_indexer import quantised_indexer
from tests.ops import engine_formulas
from tests.ops.random_inputs import indexer_inputs, packed_ranges, tied_inputs
from tests.ops.test_lightning_indexer import best_of, causal, masked_scores
from tests.ops.triton_backend import DEVICE, indexer, one_launch, quantised


def select(operator, inputs, topk, **options):
    """The operator's results in one launch, and in two for each slab."""
    on_device = [x.to(DEVICE) for x in inputs]
    found = []
    for wanted in (True, False):
        with one_launch.one_launch(wanted):
            results = operator(*on_device, topk, backend="triton", **options)
        found.append([x.cpu() for x in (results if isinstance(results, tuple) else (results,))])
    return found


def assert_same_bits(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


@pytest.fixture
def small_groups(monkeypatch):
    """Groups of five rows: a ring of three is gone through more than once."""
    monkeypatch.setattr(one_launch, "group_rows", lambda *_: 5)


def test_packed_rows_in_a_ring_of_groups(small_groups):
    """Sequences that groups do not divide, ranges that cut a document off, rows that see nothing."""
    inputs = indexer_inputs(2, 21)
    starts, ends = packed_ranges(6, 1, 14)
    ends[9] = starts[9]
    one, two = select(lightning_indexer, inputs, 4, starts=starts, ends=ends)
    assert_same_bits(one, two)
    assert torch.equal(one[0], best_of(masked_scores(inputs, starts, ends), 4))
    assert (one[0][:, 9] == -1).all()
    assert (one[1][:, 9] == -torch.inf).all()


def test_ties_go_to_the_lower_position(small_groups):
    inputs = tied_inputs(batch=1, rows=24)
    one, two = select(lightning_indexer, inputs, 5)
    assert_same_bits(one, two)
    assert torch.equal(one[0], best_of(masked_scores(inputs, *causal(24), True), 5))


@pytest.mark.parametrize("ue8m0", [True, False])
def test_scores_in_fp8_are_those_of_the_formulas(ue8m0, small_groups):
    inputs = indexer_inputs(1, 24, heads=16, dim=64, dtype=torch.bfloat16)
    starts, ends = packed_ranges(7, 17)
    options = {"powers_of_two": ue8m0, "starts": starts, "ends": ends}
    one, two = select(quantised_indexer, inputs, 6, **options)
    assert_same_bits(one, two)
    assert torch.equal(one[0], engine_formulas.selection(inputs, 6, starts, ends, ue8m0))


def test_what_was_not_measured_takes_two_launches(monkeypatch):
    inputs = indexer_inputs(1, 8)
    taken = []
    for module in (indexer, quantised):
        monkeypatch.setattr(module, "select_by", lambda *_: taken.append("two") or (None,) * 2)
        monkeypatch.setattr(module, "select_whole", lambda *_: taken.append("one") or (None,) * 2)

    def ways():
        taken.clear()
        call = indexer.IndexerCall(*inputs)
        indexer.select(call, 3, None)
        quantised.select(quantised.QuantisedCall(*inputs), 3, None)
        return set(taken)

    assert ways() == {"two"}
    with one_launch.one_launch(True):
        assert ways() == {"one"}
        with one_launch.one_launch(False):
            assert ways() == {"two"}
    monkeypatch.setattr(one_launch, "MEASURED_KEYS", 8)
    assert ways() == {"one"}
    monkeypatch.setattr(one_launch, "MEASURED_KEYS", 7)
    assert ways() == {"two"}


def test_a_group_occupies_the_gpu_and_a_ring_stays_within_its_bytes():
    tiles = {"BLOCK_Q": 32, "BLOCK_N": 256}
    for keys, rows in ((8192, 9 * 32), (32768, 3 * 32), (131072, 32)):
        assert one_launch.group_rows(10**6, keys, tiles, 4096) == rows
        assert rows // 32 * keys // 256 >= 264
        assert 3 * rows * (4 * keys + 8 * 4096) <= 64 << 20
    assert one_launch.group_rows(100, 8192, tiles, 4096) == 100
    assert 3 * one_launch.group_rows(10**6, 64, tiles, 8192) * (4 * 64 + 8 * 8192) <= 256 << 20
    assert one_launch.group_rows(10**6, 10**9, tiles, 4096) == 1


@pytest.mark.full
@settings(max_examples=20, deadline=None)
@given(
    batch=st.integers(1, 2),
    rows=st.integers(1, 9),
    keys=st.integers(1, 300),
    heads=st.integers(1, 5),
    dim=st.sampled_from([1, 16, 33]),
    topk=st.integers(1, 310),
    group=st.integers(1, 10),
    seed=st.integers(0, 1000),
)
def test_any_shape_range_and_group(batch, rows, keys, heads, dim, topk, group, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, rows, heads, dim), (batch, keys, dim), (batch, rows, heads))
    inputs = [torch.randint(-2, 3, shape, generator=generator).float() for shape in shapes]
    starts, ends = torch.randint(0, keys + 1, (2, batch, rows), generator=generator, dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_launch, "group_rows", lambda *_: group)
        one, two = select(lightning_indexer, inputs, topk, starts=starts, ends=ends)
    assert_same_bits(one, two)
    assert torch.equal(one[0], best_of(masked_scores(inputs, starts, ends), topk))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("operator", [lightning_indexer, quantised_indexer])
def test_lists_of_released_models(operator, monkeypatch):
    """DeepSeek-V3.2's indexer, rows with lists and rows that take all; on a GPU thousands of programs."""
    rows, keys = (48, 6000) if DEVICE == "cpu" else (4096, 8192)
    if DEVICE == "cpu":
        monkeypatch.setattr(one_launch, "_PROGRAMS", 24)
    inputs = indexer_inputs(1, rows, keys, heads=64, dim=128, dtype=torch.bfloat16)
    ends = torch.linspace(1, keys, rows).int()
    one, two = select(operator, inputs, 2048, ends=ends)
    assert_same_bits(one, two)
    assert ((one[0] >= 0).sum(-1) == ends.clamp_max(2048)).all()
