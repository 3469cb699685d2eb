"""``--save-retain-interval`` deletes a checkpoint only after the next one is complete."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_dsa.features.checkpoints.whole import saving
from mindspeed_dsa.runs import manifest
from mindspeed_dsa.runs.files import RunError
from mindspeed_dsa.runs.whole_checkpoints import TRACKER, put_aside, remove, state_of
from tests.features.checkpoints.whole.conftest import Job
from tests.features.checkpoints.whole.folders import checkpoint, gone


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_is_deleted_when_the_next_one_has_a_manifest_and_the_tracker(
    job: Job, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """A job killed at any moment has a complete checkpoint to resume from."""
    done: list[str] = []
    rename, replace = Path.rename, os.replace

    def renamed(old: Path, new: Path) -> Path:
        done.append(old.name)
        return rename(old, new)

    def replaced(old: Path, new: Path) -> None:
        replace(old, new)
        done.append(f"{Path(new).parent.name}/{Path(new).name}")

    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(os, "replace", replaced)
    job.args.async_save, job.args.save_retain_interval = asynchronous, 6
    for iteration in (3, 6, 9):
        job.save(iteration)
        if asynchronous:
            job.async_utils.finalize()
    assert gone(job.folder / "iter_0000003")
    assert (job.folder / "iter_0000006").is_dir()
    tracker = done.index(f"checkpoints/{TRACKER}", done.index(f"iter_0000006/{manifest.NAME}"))
    assert tracker < done.index("iter_0000003")
    assert job.load() == "iter_0000009"
    job.save(12)
    if asynchronous:
        job.async_utils.finalize()
    assert gone(job.folder / "iter_0000009")


def test_a_checkpoint_stays_where_the_next_one_is_not_written_to_its_end(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.args.save_retain_interval = 6
    job.save(3)
    # Left by a killed job: Megatron would read from it which checkpoint came before.
    (job.folder / f".{TRACKER}.iter_0000006").write_text("3")
    monkeypatch.setattr(manifest, "complete", lambda *args: (_ for _ in ()).throw(OSError(5, "killed here")))
    with pytest.raises(RunError, match="killed here"):
        job.save(6)
    assert state_of(job.folder, 3, contents=True).damage == ""
    assert job.load() == "iter_0000003"


def test_a_checkpoint_that_cannot_be_deleted_is_said_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = checkpoint(tmp_path, 3)
    checkpoint(tmp_path, 1).rename(tmp_path / ".iter_0000001.host-1.0123456789ab.deleted")

    def readonly(*args: Any) -> None:
        raise OSError(30, "Read-only file system")

    said: list[str] = []
    log = SimpleNamespace(
        warning=lambda text, *args: said.append(text % args),
        info=lambda text, *args: said.append(text % args),
    )
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", readonly)
        saving._remove(old, str(old), log)
    saving._delete(put_aside(old), "what --save-retain-interval does not keep", log)
    assert "iter_0000003 cannot be deleted: [Errno 30] Read-only file system" in said[0]
    assert "deleted" in said[1]
    assert list(tmp_path.iterdir()) == []


def test_deletions_that_overlap_are_said_to_be_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A save ends while an earlier checkpoint is still being deleted.
    said: list[str] = []
    log = SimpleNamespace(
        warning=lambda text, *args: said.append(text % args),
        info=lambda text, *args: said.append(text % args),
    )
    rmtree, at_it, go_on = shutil.rmtree, threading.Event(), threading.Event()

    def slow(path: Path, *args: Any, **kwargs: Any) -> None:
        if "iter_0000001" in Path(path).name and not at_it.is_set():
            at_it.set()
            go_on.wait(20)
        rmtree(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", slow)
    olds = [checkpoint(tmp_path, iteration) for iteration in (1, 2)]
    first, second = (
        threading.Thread(target=lambda old=old: saving._delete(put_aside(old), old.name, log)) for old in olds
    )
    first.start()
    assert at_it.wait(20)
    second.start()
    second.join(0.2)  # it waits for the first deletion, or deletes the folder itself
    go_on.set()
    first.join(20)
    second.join(20)
    assert [text.startswith("deleted ") for text in said] == [True, True], said
    assert list(tmp_path.iterdir()) == []


def test_training_does_not_wait_until_a_checkpoint_that_is_written_again_is_deleted(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Deleting terabytes takes minutes, longer than the time-out of the other ranks' collective.
    rmtree, deleting, go_on = shutil.rmtree, list[threading.Thread](), threading.Event()

    def slow(path: Path, *args: Any, **kwargs: Any) -> None:
        deleting.append(threading.current_thread())
        if deleting[-1] is not threading.main_thread():
            go_on.wait(20)
        rmtree(path, *args, **kwargs)

    for iteration in (3, 6):
        job.save(iteration)
    monkeypatch.setattr(shutil, "rmtree", slow)
    job.save(6)
    assert job.load() == "iter_0000006"
    assert state_of(job.folder, 6, contents=True).damage == ""
    go_on.set()
    assert threading.main_thread() not in deleting
    assert gone(job.folder / ".iter_0000006.replaced")
    assert deleting


def test_what_another_process_has_deleted_meanwhile_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rmtree, times = shutil.rmtree, list[Path]()

    def overtaken(path: Path, *args: Any, **kwargs: Any) -> None:
        times.append(path)
        if len(times) == 1:
            (path / "common.pt").unlink()
            raise FileNotFoundError(2, "No such file or directory", str(path / "common.pt"))
        rmtree(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", overtaken)
    remove(checkpoint(tmp_path, 3))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):  # no such checkpoint
        remove(tmp_path / "iter_0000003")
