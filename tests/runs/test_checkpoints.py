from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_dsa.runs import checkpoints as files
from mindspeed_dsa.runs.errors import RunError


def checkpoint(folder: Path, step: int, whole: bool = True) -> Path:
    path = files.folder_of(folder, step)
    path.mkdir(parents=True)
    (path / "common.pt").write_bytes(b"")
    if whole:
        (path / "metadata.json").write_text("{}")
    return path


def test_the_tracker_names_the_newest(tmp_path: Path) -> None:
    assert files.latest(tmp_path) is None
    for step in (2, 10, 4):
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 12, whole=False)
    (tmp_path / files.TRACKER).write_text("10")
    assert files.latest(tmp_path) == 10
    assert files.complete_steps(tmp_path) == [2, 4, 10]


@pytest.mark.parametrize(
    "content",
    [b"12", b"11", b"", b"release", b"\xff\xfe\x00", "\u0663".encode(), "\u00b2".encode(), b"1" * 5000],
    ids=["half written", "absent", "empty", "a word", "binary", "another script", "superscript", "endless"],
)
def test_a_tracker_that_names_nothing_is_an_error_with_a_way_out(tmp_path: Path, content: bytes) -> None:
    checkpoint(tmp_path, 3)
    checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 12, whole=False)
    (tmp_path / "iter_\u00b2").mkdir()
    (tmp_path / files.TRACKER).write_bytes(content)
    with pytest.raises(RunError, match=r"complete ones: \[3, 10\]; choose one with --ckpt-step") as refused:
        files.latest(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path / files.TRACKER} says ")
    assert len(str(refused.value)) < 400


def test_a_file_in_place_of_the_folder_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("10")
    with pytest.raises(RunError, match=r"cannot be read .*; name a folder that holds checkpoints"):
        files.latest(tmp_path / "file")


def test_a_checkpoint_that_made_room_in_vain_comes_back(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    mine = f"{socket.gethostname()}-{gone.pid}"
    # Killed between the two renames: 4 has no name any more, the new one had none yet.
    old = checkpoint(tmp_path, 4).rename(tmp_path / f".iter_0000004.{mine}.replaced")
    (old / "common.pt").write_bytes(b"old")
    new = checkpoint(tmp_path, 4).rename(tmp_path / f".iter_0000004.{mine}.partial")
    # Killed after both: the new 2 is there.
    checkpoint(tmp_path, 2).rename(tmp_path / f".iter_0000002.{mine}.replaced")
    checkpoint(tmp_path, 2)
    assert sorted(files.remove_partial(tmp_path)) == [f".iter_0000002.{mine}.replaced", new.name]
    assert files.complete_steps(tmp_path) == [2, 4]
    assert (files.folder_of(tmp_path, 4) / "common.pt").read_bytes() == b"old"
    assert not list(tmp_path.glob(".*"))


def test_only_what_dead_processes_left_is_removed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    host = socket.gethostname()
    kept = [
        f".iter_0000004.{host}-{os.getppid()}.partial",
        f".iter_0000004.elsewhere-{gone.pid}.partial",
        ".lock",
    ]
    left = [f".iter_0000004.{host}-{gone.pid}.partial", f".iter_0000002.{host}-{gone.pid}.replaced"]
    for name in (*kept, *left):
        (tmp_path / name).mkdir()
    whole = checkpoint(tmp_path, 2)
    assert sorted(files.remove_partial(tmp_path)) == sorted(left)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, whole.name])
