from __future__ import annotations

import logging
from pathlib import Path

import pytest

from mindspeed_dsa.log import Log
from mindspeed_dsa.runs import metrics


def test_the_later_record_of_a_repeated_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "new" / metrics.FILE
    for step, loss in ((1, 3.0), (2, 2.0), (3, float("inf")), (2, 1.5)):
        metrics.append(path, {"step": step, "lm_loss": loss})
    assert [(record["step"], record["lm_loss"]) for record in metrics.read(path)] == [
        (1, 3.0),
        (2, 1.5),
        (3, float("inf")),
    ]


@pytest.mark.parametrize("line", ["[1]", "{}", '{"step": 1e999}', "text"])
def test_a_line_that_is_not_a_record_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / metrics.FILE
    metrics.append(path, {"step": 1})
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=f"{path}, line 2: not a record of a step"):
        metrics.read(path)


def test_a_file_is_cut_after_a_step(tmp_path: Path) -> None:
    path = tmp_path / metrics.FILE
    assert metrics.truncate(path, 0, ()) == ([], "")
    for step in (1, 2, 3):
        metrics.append(path, {"step": step})
    assert metrics.truncate(path, 2, ()) == ([{"step": 1}, {"step": 2}], "")
    assert metrics.read(path) == [{"step": 1}, {"step": 2}]


def test_records_without_an_indexer_loss_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = [{"step": step, "lm_loss": 1 / step, "indexer_loss": None} for step in (1, 2)]
    metrics.draw(tmp_path / "loss.png", records, [{"step": 2, "heldout_loss": 1.0}], {"unigram entropy": 2.0})
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert metrics.points(records, "indexer_loss") == ([], [])


def test_training_outlives_a_file_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder is in the file's place."""
    for _ in range(2):
        metrics.append_or_warn(tmp_path, {"step": 1}, Log(logging.getLogger("test of metrics")))
    assert f"{tmp_path} lacks steps: Is a directory" in caplog.text
    assert all(record.once for record in caplog.records)


def torn(path: Path, *steps: int) -> bytes:
    """Write records to a file, tear the last one, and return its rest."""
    for step in steps:
        metrics.append(path, {"step": step, "lm_loss": 1.0})
    content = path.read_bytes()[:-9]
    path.write_bytes(content)
    return content.splitlines()[-1]


@pytest.mark.parametrize("rest", [b"", b"\0" * 100], ids=["torn", "zeros after a power cut"])
def test_a_record_that_a_kill_has_torn_is_left_out_and_cut_off(tmp_path: Path, rest: bytes) -> None:
    path = tmp_path / metrics.FILE
    assert torn(path, 1, 2, 3).startswith(b'{"step": 3')
    path.write_bytes(path.read_bytes() + rest)
    assert [record["step"] for record in metrics.read(path)] == [1, 2]
    assert [record["step"] for record in metrics.latest(path, 2)[0]] == [1, 2]
    for step in (3, 4):
        metrics.append(path, {"step": step})
    assert [record["step"] for record in metrics.read(path)] == [1, 2, 3, 4]
    assert len(path.read_bytes().splitlines()) == 4


def test_a_record_without_the_end_of_its_line_is_one(tmp_path: Path) -> None:
    path = tmp_path / metrics.FILE
    path.write_text('{"step": 1}\n{"step": 2}')
    assert metrics.read(path) == [{"step": 1}, {"step": 2}]
    assert metrics.latest(path, 1) == ([{"step": 2}], 0)
    metrics.append(path, {"step": 3})
    assert metrics.read(path) == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_what_others_wrote_is_not_cut_off(tmp_path: Path) -> None:
    path = tmp_path / metrics.FILE
    path.write_text("notes")
    metrics.append(path, {"step": 1})
    assert path.read_text() == 'notes\n{"step": 1}\n'


def test_the_last_records_are_read_from_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / metrics.FILE
    for step in range(1, 2001):
        metrics.append(path, {"step": step, "filler": "x" * (step % 97)})
    monkeypatch.setattr(metrics, "_BLOCK", 256)
    parsed = []
    whole = metrics.json.loads
    monkeypatch.setattr(metrics.json, "loads", lambda text: parsed.append(text) or whole(text))
    records, broken = metrics.latest(path, 5)
    assert [record["step"] for record in records] == [1996, 1997, 1998, 1999, 2000]
    assert broken == 0
    assert len(parsed) == 5
    monkeypatch.undo()
    assert [record["step"] for record in metrics.latest(path, 10_000)[0]] == list(range(1, 2001))
    assert metrics.latest(path, 10_000)[0] == metrics.read(path)


def test_the_last_records_are_of_the_last_time_that_a_job_came_to_a_step(tmp_path: Path) -> None:
    path = tmp_path / metrics.FILE
    for step in (1, 2, 3, 4, 5, 3, 4):
        metrics.append(path, {"step": step, "lm_loss": float(len(path.read_bytes()) if step > 1 else 0)})
    with path.open("a") as file:
        file.write("broken\n[1]\n")
    metrics.append(path, {"step": 5, "lm_loss": 0.5})
    records, broken = metrics.latest(path, 4)
    assert [record["step"] for record in records] == [2, 3, 4, 5]
    assert records[-1]["lm_loss"] == 0.5
    assert records[1]["lm_loss"] > records[0]["lm_loss"] + 100  # the second time
    assert broken == 2
