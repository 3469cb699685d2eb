"""Saves of a training loop with the calls of Megatron-LM's: what is there, and when."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_dsa.features.checkpoints.whole.claims import FILE, Claims
from mindspeed_dsa.features.checkpoints.whole.feature import FEATURE
from mindspeed_dsa.features.checkpoints.whole.work import Save
from mindspeed_dsa.features.checkpoints.whole.written import Summed
from mindspeed_dsa.runs import manifest
from mindspeed_dsa.runs.files import RunError, is_running
from mindspeed_dsa.runs.whole_checkpoints import TRACKER, choose, state_of
from tests.features.checkpoints.whole.conftest import Job
from tests.features.checkpoints.whole.folders import checkpoint, track


def test_a_save_ends_with_a_manifest_of_all_files_and_then_the_tracker(job: Job) -> None:
    job.save(3)
    job.save(6)
    for iteration in (3, 6):
        state = state_of(job.folder, iteration, contents=True)
        assert state.damage == ""
        assert state.listed is not None
        assert sorted(state.listed.files) == ["__0_0.distcp", "__0_1.distcp", "common.pt", "metadata.json"]
    assert (job.folder / TRACKER).read_text() == "6"
    assert job.checkpointing.SEEN == ["", ""]  # what --save-retain-interval deletes by, before a manifest
    left = {path.name for path in job.folder.iterdir()}
    assert left == {"iter_0000003", "iter_0000006", TRACKER, FILE}


def test_a_save_that_fails_on_the_way_is_not_named(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.save(3)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest, "write", full)
    with pytest.raises(RunError, match=r"iter_0000006 cannot be written: .*No space left .*make room"):
        job.save(6)
    assert (job.folder / TRACKER).read_text() == "3"
    assert job.load() == "iter_0000003"


def test_a_checkpoint_that_is_written_again_is_not_whole_until_it_is(job: Job) -> None:
    job.save(3)
    job.save(6)
    job.args.async_save = True
    job.save(6)
    # Megatron writes over its files: of a job that is killed now, some are of this save, some of that before.
    assert state_of(job.folder, 6).damage == manifest.WITHDRAWN
    assert job.load() == "iter_0000003"
    job.async_utils.finalize()
    assert state_of(job.folder, 6, contents=True).damage == ""
    assert job.load() == "iter_0000006"


def test_a_first_checkpoint_that_is_killed_twice_stops_no_job(job: Job) -> None:
    job.args.async_save = True
    for _ in range(2):
        job.save(3)
        job.async_utils.QUEUE.clear()  # killed
        assert job.load() is None
    job.save(3)
    job.async_utils.finalize()
    assert job.load() == "iter_0000003"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_files_are_on_the_disk_before_a_manifest_lists_them(
    job: Job, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    synced: dict[int, int] = {}
    short: list[str] = []
    rename = os.replace

    def fsync(descriptor: int) -> None:
        about = os.fstat(descriptor)
        synced[about.st_ino] = about.st_size

    def replace(old: Path, new: Path) -> None:
        if Path(new).name == manifest.NAME:
            files = [Path(new).with_name(name) for name in manifest.names(Path(new).parent)]
            short.extend(each.name for each in files if synced.get(each.stat().st_ino) != each.stat().st_size)
        rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    job.args.async_save = asynchronous
    job.save(3)
    if asynchronous:
        job.async_utils.finalize()
    assert state_of(job.folder, 3).damage == ""
    assert short == []


def test_an_asynchronous_save_is_summed_where_it_is_written(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.args.async_save = True
    job.save(3)
    (request,) = job.async_utils.QUEUE
    path = job.folder / "iter_0000003"
    assert not (path / manifest.NAME).exists()
    assert not (job.folder / TRACKER).exists()
    request.async_fn(*request.async_fn_args)  # another process may run it
    assert sorted(each.name for each in path.glob(f"{manifest.SUMS}*")) == [
        f"{manifest.SUMS}__0_{part}.distcp" for part in range(2)
    ]
    read: list[str] = []
    sums = manifest.sums

    def remember(at: Path, names: list[str]) -> dict[str, manifest.Entry]:
        read.extend(names)
        return sums(at, names)

    monkeypatch.setattr(manifest, "sums", remember)
    for function in request.finalize_fns:
        function()
    assert sorted(read) == ["common.pt", "metadata.json"]  # the shards are not read again
    assert state_of(job.folder, 3, contents=True).damage == ""
    assert (job.folder / TRACKER).read_text() == "3"
    assert not list(path.glob(f"{manifest.SUMS}*"))


def test_two_asynchronous_saves_end_one_after_the_other(job: Job) -> None:
    job.args.async_save = True
    job.save(3)
    job.save(6)
    for done in (3, 6):
        job.async_utils.finalize()
        assert (job.folder / TRACKER).read_text() == str(done)
        assert state_of(job.folder, done, contents=True).damage == ""


def test_what_writes_in_the_background_can_be_sent_to_a_process() -> None:
    write = pickle.loads(pickle.dumps(Summed(partial(print, "x"), Save(Path("nowhere"), "it", "token"), 0)))
    assert write.write.func is print
    write()


WRITERS = """
import multiprocessing, os, pathlib, sys, time, types
from mindspeed_dsa.features.checkpoints.whole.work import Open, Save
from mindspeed_dsa.features.checkpoints.whole.written import Summed, sum_a_file

save = Save(pathlib.Path(sys.argv[2]), "iter_0000001", "token")

def write():
    print(os.getpid(), flush=True)
    time.sleep(600)

work = types.SimpleNamespace(saving=save, open=Open())
one = sum_a_file(write, types.SimpleNamespace(state=lambda kind: work))
target = Summed(write, save, 0) if sys.argv[1] == "all" else one
process = multiprocessing.get_context("fork").Process(target=target)
process.start()
process.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not end processes with their parents")
@pytest.mark.parametrize("what", ["all", "one"])
def test_what_writes_ends_with_its_job(what: str, tmp_path: Path) -> None:
    """A job that is started again may write the same files, while it still does."""
    command = [sys.executable, "-c", WRITERS, what, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        number = int(job.stdout.readline())
        job.kill()
    until = time.monotonic() + 10
    while is_running(number):
        if time.monotonic() > until:
            os.kill(number, signal.SIGKILL)
            pytest.fail("the writer still runs")
        time.sleep(0.05)


def test_sums_of_an_earlier_save_are_not_taken(job: Job) -> None:
    job.args.async_save = True
    path = job.folder / "iter_0000003"
    job.save(3)
    (path / f"{manifest.SUMS}7").write_text(json.dumps({"token": "else", "files": {"__0_0.distcp": [1, 2]}}))
    job.async_utils.finalize()
    assert state_of(job.folder, 3, contents=True).damage == ""


def test_loading_passes_over_what_is_damaged_and_restores_the_arguments(job: Job) -> None:
    assert job.load() is None
    for iteration in (3, 6):
        job.save(iteration)
    assert job.load() == "iter_0000006"
    (job.folder / "iter_0000006" / "__0_1.distcp").unlink()
    assert job.load() == "iter_0000003"
    assert job.args.ckpt_step is None
    for content in ("", '{"foreign": 1}', "9"):
        track(job.folder, content)
        assert job.load() == "iter_0000003"
    (job.folder / TRACKER).unlink()
    assert job.load() == "iter_0000003"
    job.args.ckpt_step = 6
    with pytest.raises(RunError, match=r"iter_0000006 is not whole: __0_1.distcp is missing"):
        job.load()
    assert job.args.ckpt_step == 6


def test_one_load_takes_one_checkpoint_although_another_job_saves(job: Job) -> None:
    job.save(3)
    load, found = job.checkpointing._load_base_checkpoint, []
    found.append(load(str(job.folder), job.args, rank0=True))
    checkpoint(job.folder, 6)
    track(job.folder, 6)
    found.append(load(str(job.folder), job.args, sharded_state_dict=1))
    assert found == ["iter_0000003", "iter_0000003"]
    assert job.checkpointing.read_metadata(str(job.folder / TRACKER)) == (3, False)
    job.save(9)
    assert job.load() == "iter_0000009"


def test_released_weights(job: Job) -> None:
    job.save(1, release=True)
    assert state_of(job.folder, None, contents=True).damage == ""
    assert job.load() == "release"


def test_temporary_checkpoints_are_checked_and_passed_over(job: Job) -> None:
    job.args.non_persistent_ckpt_type = "global"
    job.save(3)
    job.save(5, non_persistent_ckpt=True)
    assert job.load() == "non_persistent/iter_0000005"
    (job.folder / "non_persistent" / "iter_0000005" / "common.pt").unlink()
    assert job.load() == "iter_0000003"


def test_a_folder_has_one_job(tmp_path: Path) -> None:
    """A job that runs is not disturbed; one of another machine is told when it saves again."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        started = Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19]
        theirs = {"job": "x", "host": socket.gethostname(), "pid": other.pid, "started": started}
        (tmp_path / FILE).write_text(json.dumps(theirs))
        with pytest.raises(RunError, match=f"another job saves there, process {other.pid} of this machine"):
            Claims().claim(tmp_path)
        (tmp_path / FILE).write_text(json.dumps({**theirs, "started": "1"}))  # the number came again
        Claims().claim(tmp_path)
        other.communicate(b"\n")
    (tmp_path / FILE).write_text(json.dumps(theirs))
    first, second = Claims(), Claims()
    first.claim(tmp_path)
    first.claim(tmp_path)
    second.claim(tmp_path)  # as from another machine
    with pytest.raises(RunError, match=r"another job saves there since then .*each its own folder"):
        first.claim(tmp_path)
    shutil.rmtree(tmp_path)
    second.claim(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"pid": "x", "host": 3}', '{"pid": -1}', "\x00"])
def test_a_claim_that_nobody_understands_is_replaced(content: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(content)
    Claims().claim(tmp_path)
    assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read-only and vanished file systems raise where the claim is written."""
    job.save(3)

    def readonly(*args: Any, **kwargs: Any) -> None:
        raise OSError(30, "Read-only file system", str(job.folder))

    monkeypatch.setattr(Path, "mkdir", readonly)
    with pytest.raises(RunError, match=r"Read-only file system.*name a folder that can be read and written"):
        job.save(6)
    monkeypatch.undo()
    assert choose(job.folder).state == state_of(job.folder, 3)


@pytest.mark.parametrize("newer", [False, True], ids=["until 0.17", "later"])
@pytest.mark.parametrize("written", ["torch", "torch_dcp", "torch_dist"])
def test_formats_that_cannot_be_saved_in_the_background_are_refused(written: str, newer: bool) -> None:
    args = SimpleNamespace(verify_checkpoint=False, async_save=True, ckpt_format=written, save="x")
    assert FEATURE.problems(SimpleNamespace(**{**vars(args), "async_save": False})) == []
    if newer:
        args.async_strategy = "mcore"
    served = written == "torch_dist" or (newer and written != "torch")
    problems = FEATURE.problems(args)
    assert ["--ckpt-format torch_dist, or omit --async-save" in each for each in problems] == [True] * (
        not served
    )


def test_folders_of_no_file_system_are_refused() -> None:
    args = SimpleNamespace(verify_checkpoint=False, save="msc://bucket/x", load="checkpoints")
    (problem,) = FEATURE.problems(args)
    assert "--save msc://bucket/x is no folder of a file system" in problem
