"""Recorded selections on disk: encoding, truncated and damaged files, and files of another model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mindspeed_dsa.features.dsa.selections import format
from mindspeed_dsa.features.dsa.selections.format import (
    Header,
    Key,
    Recording,
    Run,
    Writer,
    cut_off,
    positions_of,
)
from mindspeed_dsa.features.dsa.selections.replay import Handed, write_recording
from mindspeed_dsa.features.dsa.selections.rows import WrongRows, ascending, decode, encode
from mindspeed_dsa.runs.files import RunError

HEADER = Header(topk=6, layers=4, mtp_layers=1, computing=(1, 3, 5))


def chosen(visible, topk, seed: int = 0) -> np.ndarray:
    """Return distinct positions per row in random order, -1 at the tail."""
    random = np.random.default_rng(seed)
    keys = np.full((len(visible), topk), -1, np.int32)
    for row, seen in enumerate(visible):
        count = min(topk, int(seen))
        keys[row, :count] = random.permutation(int(seen))[:count]
    return keys


def in_order(keys: np.ndarray) -> np.ndarray:
    last = np.iinfo(np.int32).max
    # -1 has to stay behind all positions.
    ordered = np.sort(np.where(keys < 0, last, keys), axis=1)
    return np.where(ordered == last, -1, ordered)


@settings(max_examples=60, deadline=None)
@given(
    visible=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 70_000)), max_size=300),
    topk=st.integers(1, 20),
    seed=st.integers(0, 5),
)
def test_rows_come_back_in_order(visible, topk, seed):
    seen = np.array(visible, np.int32)
    keys = chosen(seen, topk, seed)
    assert np.array_equal(decode(encode(keys, seen), seen, topk), in_order(keys))


@pytest.mark.parametrize(("length", "most"), [(4096, 0.07), (32768, 0.18), (131072, 0.26)])
def test_bytes_beside_four_for_each_key(length, most):
    # Rows at the end of a sequence, which see the most keys.
    seen = np.arange(length - 8, length, dtype=np.int32) + 1
    # The limit is a share of four bytes per key.
    assert len(encode(chosen(seen, 2048), seen)) <= most * 8 * 2048 * 4


def test_rows_that_list_everything_and_one_that_lists_nothing():
    seen = np.array([0, 1, 6, 6], np.int32)
    keys = chosen(seen, 6)
    keys[3] = -1
    assert np.array_equal(decode(encode(keys, seen), seen, 6), in_order(keys))
    longer = np.arange(256, dtype=np.int32) + 1
    assert len(encode(chosen(longer, 256), longer)) <= 4 * 256, "bytes of rows that list everything"


@pytest.mark.parametrize("row", [0, 300])
@pytest.mark.parametrize(("wrong", "words"), [([0, 5], "sees 5 keys"), ([2, 2], "key 2 more than once")])
def test_wrong_rows_are_named(row, wrong, words):
    seen = np.full(400, 5, np.int32)
    keys = chosen(seen, 2)
    keys[row] = wrong
    for function in (encode, ascending):
        with pytest.raises(WrongRows, match=words) as caught:
            function(keys, seen)
        assert caught.value.row == row


@settings(max_examples=60, deadline=None)
@example(b"\0\0\0\0g")
@given(st.binary(max_size=60))
def test_no_bytes_decode_to_rows_that_see_less(blob):
    seen = np.array([3, 900, 4], np.int32)
    try:
        rows = decode(blob, seen, 6)
    except WrongRows:
        return
    assert (rows < seen[:, None]).all()


@pytest.mark.parametrize("listed", [2, 600], ids=["gaps", "bits"])
def test_a_stream_without_its_end_is_refused(listed):
    seen = np.array([900, 901], np.int32)
    blob = encode(chosen(seen, listed), seen)
    # The first four bytes are the length of the stream.
    for size in range(5, len(blob)):
        short = (size - 5).to_bytes(4, "little") + blob[4:size]
        with pytest.raises(WrongRows):
            decode(short, seen, listed)
    longer = (len(blob) - 4).to_bytes(4, "little") + blob[4:] + b"\0"
    with pytest.raises(WrongRows, match="end before or after their rows"):
        decode(longer, seen, listed)


def visible_of(runs) -> np.ndarray:
    positions, documents = positions_of(runs)
    return positions - documents + 1


# -- recordings ----------------------------------------------------------------------------------


def record(folder, rank: int = 0, steps=(1, 2), header: Header = HEADER, seed: int = 0) -> Writer:
    """Write two runs of rows, of two documents, for every layer."""
    writer = Writer(folder, rank, header)
    runs = [Run(0, 4, 8), Run(12, 12, 10)]
    for step in steps:
        for layer in header.computing:
            keys = chosen(visible_of(runs), header.topk, seed + 10 * step + layer)
            writer.append(Key(step, 0, layer), runs, in_order(keys))
    writer.close()
    return writer


def test_a_recording_as_engines_hand_it_over(tmp_path):
    record(tmp_path)
    recording = Recording.open(tmp_path)
    assert [key.step for key in recording.places()] == [1] * 3 + [2] * 3
    array = recording.array(2, 0)
    assert array.shape == (22, 3, 6)
    assert array.dtype == np.int32
    assert (array[:4] == -1).all(), "rows that were not recorded"
    runs = [Run(0, 4, 8), Run(12, 12, 10)]
    expected = in_order(chosen(visible_of(runs), 6, 23))
    assert np.array_equal(array[4:, 1], expected)
    with pytest.raises(RunError, match="no selection of step 3, sequence 0"):
        recording.array(3, 0)


def test_selections_that_are_handed_over_come_back(tmp_path):
    seen = np.concatenate([np.arange(9), np.arange(14)]).astype(np.int32) + 1
    # The documents begin at rows 0 and 9.
    array = np.stack([chosen(seen, 6, seed) for seed in range(3)], axis=1).astype(np.int64)
    path = write_recording(tmp_path, HEADER, [Handed(7, 1, array, (0, 9))])
    assert path.is_file()
    found = Recording.open(tmp_path).array(7, 1)
    assert np.array_equal(found.reshape(-1, 6), in_order(array.reshape(-1, 6)))


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((3, 2, 6), np.int32), "3 layers that select at most 6"),
        (np.zeros((3, 3, 7), np.int32), "3 layers that select at most 6"),
        (np.full((3, 3, 6), 2, np.int32), "layer 1: token 0 lists key 2 and sees 1"),
        (
            np.where(np.arange(6) < 2, 0, -1) * np.ones((3, 3, 1), np.int32),
            "token 0 lists key 0 more than once",
        ),
        (np.full((3, 3, 6), 2**32), "layer 1: token 0 lists key 4294967296 and sees 1"),
        (
            np.full((3, 3, 6), 2**64 - 1, np.uint64),
            "layer 1: token 0 lists key 9223372036854775807 and sees 1",
        ),
        (np.zeros((3, 3, 6)), "selections are float64; hand over positions as integers"),
    ],
    ids=["layers", "topk", "not visible", "twice", "64 bits", "unsigned", "floats"],
)
def test_nothing_is_left_of_selections_that_are_wrong(tmp_path, array, words):
    with pytest.raises(RunError, match=words):
        write_recording(tmp_path, HEADER, [Handed(1, 0, array)])
    assert not list(tmp_path.iterdir())


def test_a_file_cut_anywhere_gives_the_records_before(tmp_path):
    path = record(tmp_path / "whole").path
    data = path.read_bytes()
    # Every seventh size is enough to end inside each part of a record.
    for size in range(len(HEADER.to_bytes()), len(data), 7):
        cut = tmp_path / f"cut-{size}"
        cut.mkdir()
        (cut / path.name).write_bytes(data[:size])
        recording = Recording.open(cut)
        whole = Recording.open(tmp_path / "whole").places()
        assert recording.places() == whole[: len(recording.places())]
        for key in recording.places():
            assert recording.rows(key) is not None


def test_who_goes_on_cuts_off_half_a_record_and_later_steps(tmp_path):
    path = record(tmp_path, steps=(1, 2, 3)).path
    with path.open("ab") as file:
        # Half a record, as a killed job leaves it.
        file.write(b"\x80\0\0\0half")
    cut_off(tmp_path, 0, 1, first_step=2)
    assert Recording.open(tmp_path).places() == [Key(1, 0, layer) for layer in HEADER.computing]
    record(tmp_path, steps=(2, 3))
    assert [path.name for path in tmp_path.iterdir()] == [path.name]
    found = Recording.open(tmp_path)
    assert [key.step for key in found.places()] == [1] * 3 + [2] * 3 + [3] * 3
    assert not found.problems


def test_a_writer_goes_on_behind_the_last_whole_record(tmp_path):
    path = record(tmp_path, steps=(1,)).path
    whole = path.read_bytes()
    path.write_bytes(whole + b"\x80\0\0\0half")
    Writer(tmp_path, 0, HEADER).close()
    assert path.read_bytes() == whole
    path.write_bytes(whole[:10])
    record(tmp_path, steps=(1,))
    assert path.read_bytes() == whole
    with pytest.raises(RunError, match="is of another model, or no recording; record into a folder of its"):
        Writer(tmp_path, 0, Header(8, 4, 1, (1, 3, 5)))
    assert path.read_bytes() == whole


def test_nothing_is_left_of_ranks_that_a_job_in_another_layout_lacks(tmp_path):
    # Files of five ranks; the job goes on with two.
    for rank in range(5):
        record(tmp_path, rank, steps=(1, 2, 3), seed=1000 * rank)
    for rank in range(2):
        cut_off(tmp_path, rank, 2, first_step=2)
        record(tmp_path, rank, steps=(2, 3), seed=7777)
    path = record(tmp_path / "alone", steps=(2, 3), seed=7777).path
    expected = Recording.open(path.parent)
    recording = Recording.open(tmp_path)
    assert recording.places() == [Key(step, 0, layer) for step in (1, 2, 3) for layer in HEADER.computing]
    for step in (2, 3):
        assert np.array_equal(recording.array(step, 0), expected.array(step, 0))


def test_selections_handed_over_damage_no_file_and_count_last(tmp_path):
    before = [record(tmp_path, rank).path.read_bytes() for rank in (0, 2)]
    array = np.stack([chosen(np.arange(1, 9, dtype=np.int32), 6, 50 + seed) for seed in range(3)], axis=1)
    path = write_recording(tmp_path, HEADER, [Handed(1, 0, array)])
    assert [(tmp_path / f"rank0000{rank}.selections").read_bytes() for rank in (0, 2)] == before
    assert path.name == "rank00003.selections"
    found = Recording.open(tmp_path).array(1, 0)[: len(array)]
    assert np.array_equal(found.reshape(-1, 6), in_order(array.reshape(-1, 6)))


FIRST_COUNT = format._PREFIX.size + format._RECORD.size + 8
"""Offset of the first run's row count in a record."""


@pytest.mark.parametrize(
    ("at", "bit"), [(100, 2), (240, 2), (-3, 2), (FIRST_COUNT + 3, 5), (FIRST_COUNT + 3, 7)]
)
def test_a_flipped_bit_is_named(tmp_path, at, bit):
    path = record(tmp_path).path
    data = bytearray(path.read_bytes())
    begin = len(HEADER.to_bytes())
    data[begin + at if at > 0 else at] ^= 1 << bit
    path.write_bytes(bytes(data))
    recording = Recording.open(tmp_path)
    words = r"rank00000\.selections: the selection of step \d+, sequence 0, layer \d is damaged"
    with pytest.raises(RunError, match=words):
        list(map(recording.rows, recording.places()))


def test_recordings_of_two_models_in_one_folder_are_refused(tmp_path):
    record(tmp_path)
    record(tmp_path, rank=1, header=Header(8, 4, 1, (1, 3, 5)))
    words = r"several models: topk is 6 in rank00000\.selections and 8 in rank00001\.selections"
    with pytest.raises(RunError, match=words):
        Recording.open(tmp_path)


def test_folders_without_a_recording(tmp_path):
    with pytest.raises(RunError, match="holds no recorded selections; name the folder"):
        Recording.open(tmp_path)
    (tmp_path / "rank00000.selections").write_bytes(b"something else")
    with pytest.raises(RunError, match="no recording that can be read"):
        Recording.open(tmp_path)


def test_differences_of_models_are_named():
    problems = list(HEADER.problems(Header(6, 4, 1, (1, 2, 5))))
    assert problems == ["layers [1, 3, 5] select keys in the recording, and [1, 2, 5] in the model"]
