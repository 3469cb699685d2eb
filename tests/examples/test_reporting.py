from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pty
import struct
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from dsa_job import reporting


def record(step: int, loss: float = 2.0) -> dict[str, Any]:
    return {
        "step": step,
        "lm_loss": loss,
        "indexer_loss": 1e-5,
        "grad_norm": 1.0,
        "tokens_per_s": 100.0,
        "step_time_s": 0.5,
        "peak_memory_bytes": 1 << 20,
    }


ARGS = argparse.Namespace(no_tensorboard=False, no_plot=False, log_interval=10, train_iters=12)


def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = reporting.Reporter(ARGS, tmp_path, 0, quiet=False)
    reporter.evaluation(0, 5.0)
    reporter.start(0)
    for step in range(1, 13):
        reporter.step(record(step, 13.0 - step))
    reporter.evaluation(12, 1.5)
    summary = reporter.finish(unigram_entropy=3.25, wall_s=7.0)
    assert summary == {
        "unigram_entropy": 3.25,
        "final_lm_loss": 5.5,  # mean of 1 to 10
        "heldout_loss_first": 5.0,
        "heldout_loss_last": 1.5,
        "steps": 12,
        "wall_s": 7.0,
    }
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [record(step, 13.0 - step) for step in range(1, 13)]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "tensorboard").glob("events.*"))
    printed = capsys.readouterr().out
    assert [text.split("|")[0].strip() for text in printed.splitlines() if "lm loss" in text] == [
        "step     1/12",
        "step    10/12",
        "step    12/12",
    ]
    assert "held-out loss 5.0000 -> 1.5000" in printed


def test_steps_that_come_again_are_dropped(tmp_path: Path) -> None:
    first = reporting.Reporter(ARGS, tmp_path, 0, quiet=True)
    first.evaluation(0, 5.0)
    for step in (1, 2, 3):
        first.step(record(step))
    first.evaluation(3, 4.0)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lm_l')  # a killed process
    second = reporting.Reporter(ARGS, tmp_path, 2, quiet=True)
    # A partial line from a killed process is no damage.
    assert not (tmp_path / "metrics.jsonl.damaged").exists()
    assert [entry["step"] for entry in second.records] == [1, 2]
    assert [entry["step"] for entry in second.heldout] == [0]
    second.step(record(3, 9.0))
    second.close()
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(entry["step"], entry["lm_loss"]) for entry in lines] == [(1, 2.0), (2, 2.0), (3, 9.0)]


@pytest.mark.parametrize(
    "line",
    [b"\xff\xfe\x00binary", b"[1, 2]", b'{"step": "2"}', b'{"step": 2}', b"[" * 100_000],
    ids=["binary", "list", "a word for a number", "no loss", "deep"],
)
def test_damaged_metrics_are_told_of_and_kept_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes
) -> None:
    whole = [json.dumps(record(step)).encode() for step in (1, 2, 3)]
    content = b"\n".join([whole[0], line, *whole[1:]]) + b"\n"
    (tmp_path / "metrics.jsonl").write_bytes(content)
    reporter = reporting.Reporter(ARGS, tmp_path, 2, quiet=False)
    reporter.close()
    assert [entry["step"] for entry in reporter.records] == [1, 2]
    assert capsys.readouterr().out == (
        f"{tmp_path / 'metrics.jsonl'} is damaged: 1 of its 4 lines, first line 2, are not records of "
        "steps; the run continues without them, and the original is kept as metrics.jsonl.damaged\n"
    )
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == content
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reporter = reporting.Reporter(ARGS, None, 0, quiet=True)
    reporter.step(record(1))
    reporter.finish(unigram_entropy=3.0, wall_s=1.0)
    assert not list(tmp_path.iterdir())


def test_a_terminal_gets_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = pty.openpty()
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    with open(writing, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        reporter = reporting.Reporter(ARGS, None, 0, quiet=False)
        reporter.start(0)
        for step in range(1, 13):
            reporter.step(record(step))
        reporter.close()
        monkeypatch.undo()
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed: everything was read
        while piece := os.read(reading, 1 << 16):
            shown += piece
    os.close(reading)
    assert b"12/12" in shown
    assert b"lm_loss=2.000" in shown
