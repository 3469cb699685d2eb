from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from dsa_job import checkpoints as files

from mindspeed_dsa.runs.files import RunError


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
def test_a_tracker_that_names_nothing_is_said_and_the_newest_is_taken(tmp_path: Path, content: bytes) -> None:
    checkpoint(tmp_path, 3)
    checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 12, whole=False)
    (tmp_path / "iter_\u00b2").mkdir()
    (tmp_path / files.TRACKER).write_bytes(content)
    found, passed = files.find(tmp_path)
    assert found == files.folder_of(tmp_path, 10)
    assert len(passed) < 500
    assert "passed over: " in passed


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


def test_a_checkpoint_that_made_room_in_vain_comes_back_on_another_machine(tmp_path: Path) -> None:
    """Killed between the two renames, and restarted on a machine that does not know the process."""
    (tmp_path / files.TRACKER).write_text("4")
    for host, content in (("elsewhere", b"old"), ("nowhere", b"older")):
        old = checkpoint(tmp_path, 4).rename(tmp_path / f".iter_0000004.{host}-1.replaced")
        (old / "common.pt").write_bytes(content)
        os.utime(old / "metadata.json", (0, 2e9 if content == b"old" else 1e9))
    half = checkpoint(tmp_path, 4, whole=False).rename(tmp_path / ".iter_0000004.elsewhere-1.partial")
    assert files.find(tmp_path, 4)[0] == files.folder_of(tmp_path, 4)
    assert files.latest(tmp_path) == 4
    assert (files.folder_of(tmp_path, 4) / "common.pt").read_bytes() == b"old"
    assert half.exists()


def test_what_made_room_for_a_process_that_runs_stays_where_it_is(tmp_path: Path) -> None:
    running = f".iter_0000004.{socket.gethostname()}-{os.getppid()}.replaced"
    checkpoint(tmp_path, 4).rename(tmp_path / running)
    with pytest.raises(RunError, match="iter_0000004 is not whole: it is missing"):
        files.find(tmp_path, 4)
    assert (tmp_path / running).is_dir()


def test_a_checkpoint_is_replaced_although_another_machine_gives_the_old_its_name_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkpoint(tmp_path, 4) / "common.pt").write_bytes(b"old")
    partial = files.begin(tmp_path, 4)
    for name in ("common.pt", "metadata.json"):
        (partial / name).write_bytes(b"new")
    rename, met = os.rename, []

    def met_between(source: Path, target: Path) -> None:
        if source == partial and not met:
            met.append(source)
            rename(partial.with_suffix(".replaced"), files.folder_of(tmp_path, 4))
        rename(source, target)

    monkeypatch.setattr(os, "rename", met_between)
    files.publish(partial, 4, verify=False)
    assert met
    assert (files.folder_of(tmp_path, 4) / "common.pt").read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000004", files.TRACKER]


def test_names_are_on_the_disk_before_the_old_checkpoint_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(tmp_path, 4)
    partial = files.begin(tmp_path, 4)
    done: list[str] = []
    delete = files.shutil.rmtree
    monkeypatch.setattr(files, "sync", lambda path: done.append(f"sync {path.name}"))
    monkeypatch.setattr(
        files.shutil, "rmtree", lambda path, **how: done.append("delete") or delete(path, **how)
    )
    files.publish(partial, 4, verify=False)
    assert done.index(f"sync {tmp_path.name}") < done.index("delete")
