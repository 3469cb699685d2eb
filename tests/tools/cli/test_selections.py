"""``selections``: equal keys count as sets in rows that select; attention on keys that B lacks is lost."""

from __future__ import annotations

import json
import sys
import textwrap

import numpy as np
import pytest

from mindspeed_dsa.__main__ import main
from mindspeed_dsa.features.dsa.selections.format import Header, Key, Recording, Run, Writer
from mindspeed_dsa.tools.cli import selections as agreement

TOPK, LENGTH = 4, 300
HEADER = Header(TOPK, 2, 0, (1, 2))


def selection(seed: int, length: int = LENGTH) -> np.ndarray:
    random = np.random.default_rng(seed)
    keys = np.full((length, TOPK), -1, np.int32)
    for row in range(length):
        count = min(TOPK, row + 1)
        keys[row, :count] = np.sort(random.permutation(row + 1)[:count])
    return keys


def record(folder, seeds, mass=None, header=HEADER, step: int = 1):
    writer = Writer(folder, 0, header)
    for layer, seed in zip(header.computing, seeds, strict=True):
        writer.append(Key(step, 0, layer), [Run(0, 0, LENGTH)], selection(seed), mass)
    writer.close()
    return folder


def test_equal_keys_are_counted_as_sets(tmp_path):
    a, b = record(tmp_path / "a", (1, 1)), record(tmp_path / "b", (1, 2))
    layers = agreement.compare(Recording.open(a), Recording.open(b))
    one, two = (selection(seed)[TOPK:] for seed in (1, 2))  # the first rows see no more than they list
    common = [len(set(x) & set(y)) for x, y in zip(one.tolist(), two.tolist(), strict=True)]
    assert layers[1].value("keys") == layers[1].value("same") == 1
    assert layers[2].rows == LENGTH - TOPK
    assert layers[2].value("keys") == pytest.approx(sum(common) / one.size)
    assert layers[2].value("same") == pytest.approx(common.count(TOPK) / len(common))
    whole = layers[2].whole
    assert sum(whole[place] for place in agreement.PLACES) == one.size
    assert whole["head"] == (one < agreement.ENDS).sum()
    near = (one >= (np.arange(TOPK, LENGTH) + 1 - agreement.ENDS)[:, None]) & (one >= agreement.ENDS)
    assert whole["near"] == near.sum()
    of_length = [sum(common[64 - TOPK - 1 : 127 - TOPK]) / (64 * TOPK)]
    assert layers[2].value(64) == pytest.approx(of_length[0])


def test_the_attention_on_keys_that_b_lacks_is_lost(tmp_path):
    mass = np.random.default_rng(0).random((LENGTH, TOPK)).astype(np.float32)
    a = record(tmp_path / "a", (1, 1), mass)
    b = record(tmp_path / "b", (1, 2))
    layers = agreement.compare(Recording.open(a), Recording.open(b))
    assert layers[1].value("lost") == 0
    one, two = (selection(seed)[TOPK:] for seed in (1, 2))
    rows = zip(one, two.tolist(), strict=True)
    lacking = np.array([[key not in row for key in keys] for keys, row in rows])
    rounded = mass[TOPK:].astype(np.float16).astype(np.float64)
    assert layers[2].value("lost") == pytest.approx((rounded * lacking).sum() / rounded.sum(), rel=1e-5)
    assert agreement.compare(Recording.open(b), Recording.open(a))[2].value("lost") is None


def test_tables_json_and_picture(tmp_path, capsys):
    a, b = record(tmp_path / "a", (1, 1)), record(tmp_path / "b", (1, 2))
    report, picture = tmp_path / "found.json", tmp_path / "found.png"
    assert main(["selections", str(a), str(b), "--json", str(report), "--picture", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "100.000%" in said
    assert "64 to 127" in said
    found = json.loads(report.read_text())
    assert found["layers"]["1"]["equal_keys"] == 1
    assert 0 < found["all"]["equal_keys"] < 1
    assert picture.stat().st_size > 1000


def test_what_a_recording_holds(tmp_path, capsys):
    assert main(["selections", str(record(tmp_path, (1, 1)))]) == 0
    said = capsys.readouterr().out
    for words in ("at most 4", "1, from 1 to 1", "1, 2", "of int32"):
        assert words in said


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: record(folder, (1, 1), header=Header(TOPK, 3, 0, (1, 3))), "are of different models"),
        (lambda folder: record(folder, (1, 1), step=7), "no step, sequence and layer in common"),
    ],
    ids=["another model", "another step"],
)
def test_recordings_that_cannot_be_compared(tmp_path, capsys, make, words):
    a = record(tmp_path / "a", (1, 1))
    assert main(["selections", str(a), str(make(tmp_path / "b"))]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--json", "--picture"])
def test_files_that_cannot_be_written_are_refused_before_a_job_runs(tmp_path, capsys, flag):
    with pytest.raises(SystemExit) as ended:
        main(["selections", "--x 1", "--x 2", flag, str(tmp_path / "no" / "file.png"), "--", "false"])
    assert ended.value.code == 2
    assert f"make the folder {tmp_path / 'no'} first" in capsys.readouterr().err


def test_a_switch_is_a_side(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["selections", "", "--bf16", f"--json={tmp_path / 'no' / 'file'}", "--", "false"])
    assert f"make the folder {tmp_path / 'no'} first" in capsys.readouterr().err


def test_a_job_is_run_with_the_flags_of_either_side(tmp_path, capsys):
    job = tmp_path / "job.py"
    job.write_text(
        textwrap.dedent(
            """
            import sys
            from pathlib import Path
            from tests.tools.cli.test_selections import record
            flags = sys.argv[1:]
            assert flags[flags.index("--dsa-record-selections-steps") + 1] == "1", flags
            seed = int(flags[flags.index("--seed") + 1])
            if seed == 3:
                sys.exit("no such seed")
            record(Path(flags[flags.index("--dsa-record-selections") + 1]), (1, seed))
            """
        )
    )
    command = ["--", sys.executable, str(job)]
    assert main(["selections", "--seed 1", "--seed 2", *command]) == 0
    assert "100.000%" in capsys.readouterr().out
    assert main(["selections", "--seed 1", "--seed 3", *command]) == 1
    said = capsys.readouterr().err
    assert "B: the job ended with exit code 1" in said
    assert "no such seed" in said
