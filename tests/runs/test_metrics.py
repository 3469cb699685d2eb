from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_dsa.runs import metrics, plot


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
    plot.draw(tmp_path / "loss.png", records, [{"step": 2, "heldout_loss": 1.0}], {"unigram entropy": 2.0})
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert plot.points(records, "indexer_loss") == ([], [])
