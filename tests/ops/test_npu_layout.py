"""How the NPU backend finds the keys that rows see, and when it has to read from the device."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops.checks import set_debug_checks
from mindspeed_dsa.ops.npu.layout import Layout, layout_of_indices, layout_of_ranges, layout_of_selection
from mindspeed_dsa.ops.row_ranges import TO_LAST_KEY, Ranges, RowForm, visible_ranges
from tests.npu.selected_indices import causal_indices, packed_indices, watch_reads
from tests.ops.random_inputs import packed_ranges

CPU = torch.device("cpu")


@pytest.fixture
def reads(monkeypatch):
    return watch_reads(monkeypatch)


def test_default_rows_need_no_reading(reads):
    ranges = visible_ranges("test", 2, 30, 30, None, None, CPU)
    assert layout_of_ranges(ranges, 30) == Layout(2, 30, 30, None, CPU)
    assert not reads


def test_everything_else_is_read_once_per_question(reads):
    ranges = visible_ranges("test", 2, 30, 30, *packed_ranges(10, 20), CPU)
    # Lengths of both sequences, in each of two batch rows.
    assert layout_of_ranges(ranges, 30) == Layout(2, 30, 30, (10, 20, 10, 20), CPU)
    assert len(reads) == 1
    indices = packed_indices((10, 20), 16)[None]
    assert layout_of_indices(indices, 30) == Layout(1, 30, 30, (10, 20), CPU)
    assert len(reads) == 2


# Changes that, like collectives, may leave no trace in the tensor's version counter.
UNSEEN = {
    "data": lambda tensor: tensor.data.__setitem__((0, 29, 15), -1),
    "numpy": lambda tensor: tensor.numpy().__setitem__((0, 29, 15), -1),
    "in-place": lambda tensor: tensor.__setitem__((0, 29, 15), -1),
}


@pytest.mark.parametrize("change", UNSEEN)
def test_indices_that_changed_have_another_layout(change):
    indices = packed_indices((10, 20), 16)[None]
    assert layout_of_indices(indices, 30) == Layout(1, 30, 30, (10, 20), CPU)
    # With one more key, these indices are no packed layout.
    assert isinstance(layout_of_indices(indices, 31), str)
    UNSEEN[change](indices)
    assert isinstance(layout_of_indices(indices, 30), str)


@pytest.mark.parametrize("plain", [True, False])
def test_ranges_that_changed_have_another_layout(plain):
    # The layout cache must notice other starts for the same ends, and ends that used to be causal.
    ranges = visible_ranges("test", 1, 30, 30, *((None, None) if plain else packed_ranges(10, 20)), CPU)
    assert not isinstance(layout_of_ranges(ranges, 30), str)
    starts, ends = ranges.starts.clone(), ranges.ends
    starts[0, 4] = 1
    assert isinstance(layout_of_ranges(Ranges(starts, ends, False), 30), str)
    ends.data[0, 12] = 3
    starts, ends = visible_ranges("test", 1, 30, 30, ranges.starts, ends, CPU)[:2]
    assert isinstance(layout_of_ranges(Ranges(starts, ends, False), 30), str)


@pytest.mark.parametrize("topk", [2, 5, 30, 40])
def test_both_ways_to_find_a_layout_agree(topk):
    for lengths in ((30,), (1, 29), (10, 20), (1,) * 30):
        ranges = visible_ranges("test", 1, 30, 30, *packed_ranges(*lengths), CPU)
        layout = layout_of_ranges(ranges, 30)
        assert layout == Layout(1, 30, 30, None if lengths == (30,) else lengths, CPU)
        assert layout_of_indices(packed_indices(lengths, topk)[None], 30) == layout


# 30 rows after 10 cached keys: row i sees keys 0 to 10 + i.
CAUSAL = (torch.zeros(30).int(), torch.arange(11, 41).int())
FORMS = {
    "to-last-key": (TO_LAST_KEY, CAUSAL, 40, causal_indices(1, 30, 40, 16)),
    "packed": (RowForm((10, 20)), packed_ranges(10, 20), 30, packed_indices((10, 20), 16)[None]),
    "whole": (RowForm((30,)), packed_ranges(30), 30, causal_indices(1, 30, 30, 16)),
}


@pytest.fixture
def debug_checks(request):
    before = set_debug_checks(request.param)
    yield
    set_debug_checks(before)


@pytest.mark.parametrize("debug_checks", [False], indirect=True)
@pytest.mark.parametrize("form", FORMS)
def test_what_the_host_knows_is_not_read_and_is_what_reading_finds(debug_checks, reads, form):
    known, ranges, keys, indices = FORMS[form]
    said = layout_of_ranges(visible_ranges("test", 1, 30, keys, *ranges, CPU, known), keys)
    of_indices = layout_of_selection("test", indices, keys, known)
    assert not reads
    assert said == of_indices == layout_of_ranges(visible_ranges("test", 1, 30, keys, *ranges, CPU), keys)
    assert of_indices == layout_of_indices(indices, keys)
    # Only the two calls without a form have read, one question each.
    assert len(reads) == 2
    # Layers share the layout that was copied to the device.
    assert said is of_indices


@pytest.mark.parametrize("debug_checks", [True], indirect=True)
@pytest.mark.parametrize("form", FORMS)
def test_debug_checks_read_what_the_host_says(debug_checks, form):
    form_of_rows, (starts, ends), keys, indices = FORMS[form]
    visible_ranges("test", 1, 30, keys, starts, ends, CPU, form_of_rows)
    layout_of_selection("test", indices, keys, form_of_rows)
    others = ends.clone()
    others[7] = 3
    with pytest.raises(ValueError, match="test: starts and ends are not those of the form"):
        visible_ranges("test", 1, 30, keys, starts, others, CPU, form_of_rows)
    indices = indices.clone()
    # Row 29 sees 20 keys, so it must list 16 of them.
    indices[0, 29, 15] = -1
    with pytest.raises(ValueError, match="test: topk_indices do not list what rows of the form"):
        layout_of_selection("test", indices, keys, form_of_rows)


@pytest.mark.parametrize(
    ("form", "batch", "rows", "keys"),
    [
        # Fewer keys than rows.
        (TO_LAST_KEY, 1, 30, 29),
        # 10 + 21 is not 30 rows.
        (RowForm((10, 21)), 1, 30, 30),
        # Packed rows have as many keys as rows.
        (RowForm((10, 20)), 1, 30, 31),
        # An empty sequence.
        (RowForm((0, 30)), 1, 30, 30),
        # The second sequence would cross into the next batch row.
        (RowForm((20, 20, 20)), 2, 30, 30),
        # No sequence at all.
        (RowForm(()), 1, 30, 30),
    ],
    ids=str,
)
def test_a_form_of_other_rows_is_refused(form, batch, rows, keys):
    with pytest.raises(ValueError, match=r"test: .*; pass no form"):
        form.check("test", batch, rows, keys)


def test_offsets_of_sequences_start_afresh_in_each_row_of_the_batch():
    layout = Layout(2, 5, 5, (2, 3, 5), CPU)
    assert layout.prefix_sums == [2, 5, 10]
    assert layout.query_lengths.tolist() == [2, 5, 10]
    assert layout.query_lengths.dtype == torch.int32
    indices = torch.stack([packed_indices((2, 3), 4), packed_indices((5,), 4)])
    packed = layout.pack_indices(indices)
    # The second batch row and the first sequence begin at zero already.
    assert torch.equal(packed[5:], indices[1])
    assert torch.equal(packed[2:5], torch.where(indices[0, 2:] < 0, -1, indices[0, 2:] - 2))
    assert torch.equal(layout.unpack_indices(packed), indices)


@pytest.mark.parametrize("outside", [30, 2**31 + 3, 2**32 + 3, -2, -(2**32) + 5])
def test_indices_outside_of_the_keys_are_like_minus_one(outside):
    """Such an index counts neither as a key nor, truncated to int32, as another key."""
    indices = packed_indices((10, 20), 16)[None].long()
    wrong = indices.masked_fill(indices < 0, outside)
    layout = layout_of_indices(wrong, 30)
    assert layout == Layout(1, 30, 30, (10, 20), CPU)
    assert torch.equal(layout.pack_indices(wrong), layout.pack_indices(indices))
    assert isinstance(layout_of_indices(wrong.index_fill(2, torch.tensor(0), outside), 30), str)


def test_inference_tensors_have_a_layout_too():
    with torch.inference_mode():
        assert layout_of_indices(causal_indices(1, 9, 9, 4), 9) == Layout(1, 9, 9, None, CPU)
