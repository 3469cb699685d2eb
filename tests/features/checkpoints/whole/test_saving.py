"""Files on disk during the saves of a training loop that calls Megatron-LM's functions."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from mindspeed_dsa.features.checkpoints.whole import saving
from mindspeed_dsa.features.checkpoints.whole.feature import FEATURE
from mindspeed_dsa.features.checkpoints.whole.saving import EndsWithJob
from mindspeed_dsa.features.checkpoints.whole.work import LOCK, Work
from mindspeed_dsa.runs import manifest
from mindspeed_dsa.runs.files import RunError, is_running
from mindspeed_dsa.runs.whole_checkpoints import TRACKER, choose, put_back, state_of
from tests.features.checkpoints.whole.conftest import Job
from tests.features.checkpoints.whole.folders import checkpoint, gone, track


def test_a_save_ends_with_a_manifest_of_all_files_and_then_the_tracker(job: Job) -> None:
    job.save(3)
    job.save(6)
    for iteration in (3, 6):
        state = state_of(job.folder, iteration, contents=True)
        assert state.damage == ""
        assert state.listed is not None
        assert sorted(state.listed.files) == ["__0_0.distcp", "__0_1.distcp", "common.pt", "metadata.json"]
    assert (job.folder / TRACKER).read_text() == "6"
    # Megatron saw no earlier tracker, so it deleted nothing for --save-retain-interval.
    assert job.checkpointing.SEEN == ["", ""]
    left = {path.name for path in job.folder.iterdir()}
    assert left == {"iter_0000003", "iter_0000006", TRACKER, LOCK}


def test_a_save_that_fails_on_the_way_is_not_named(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.save(3)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest, "write", full)
    with pytest.raises(RunError, match=r"iter_0000006 cannot be written: .*No space left .*make room"):
        job.save(6)
    assert (job.folder / TRACKER).read_text() == "3"
    assert job.load() == "iter_0000003"


class Killed(BaseException):
    """A signal that ends the job at any point; not an ``Exception``, so nothing catches it."""


@pytest.mark.parametrize("written", ["torch", "torch_dist"])
@pytest.mark.parametrize("before", ["whole", "deleted", "elsewhere"])
def test_a_checkpoint_that_is_written_again_is_not_whole_until_it_is(
    job: Job, monkeypatch: pytest.MonkeyPatch, written: str, before: str
) -> None:
    """While a checkpoint is written again, it is incomplete, although the tracker still names it."""
    # The job has gone back to an earlier checkpoint and reaches the same iteration again.
    job.args.ckpt_format = written
    job.save(3)
    job.save(6)
    again = job.folder / "iter_0000006"
    if before != "whole":
        again.rename(job.folder / "moved")
    if before == "elsewhere":
        again.symlink_to("moved")
    # The job is killed between two files.
    write, done = job.checkpointing.write_shard, list[str]()

    def killed(path: str, content: bytes) -> None:
        if done:
            raise Killed
        write(path, content)
        done.append(path)

    with monkeypatch.context() as patched:
        patched.setattr(job.checkpointing, "write_shard", killed)
        with pytest.raises(Killed):
            job.save(6)
    assert done
    assert state_of(job.folder, 6).damage == "it was not written to its end"
    assert job.load() == "iter_0000003"
    job.save(6)
    assert state_of(job.folder, 6, contents=True).damage == ""
    assert job.load() == "iter_0000006"


@pytest.mark.parametrize("ended", ["before a file", "before the tracker", "never"])
def test_the_only_checkpoint_outlives_a_job_that_writes_it_again(
    job: Job, monkeypatch: pytest.MonkeyPatch, ended: str
) -> None:
    """The next job that locks the folder goes on from it, or from the new one if that is whole."""
    job.save(6, content=b"old")
    place = {"before a file": (job.checkpointing, "write_shard"), "before the tracker": (saving, "tracked")}

    def killed(*args: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        if ended in place:
            patched.setattr(*place[ended], killed)
        with contextlib.suppress(Killed):
            job.save(6, content=b"new")
    put_back(job.folder)
    assert state_of(job.folder, 6, contents=True).damage == ""
    assert job.load() == "iter_0000006"
    shard = (job.folder / "iter_0000006" / "__0_0.distcp").read_bytes()
    assert shard == (b"old" if ended == "before a file" else b"new")
    job.save(6, content=b"newer")
    assert gone(job.folder / ".iter_0000006.replaced")
    assert (job.folder / "iter_0000006" / "__0_0.distcp").read_bytes() == b"newer"


def test_a_job_puts_back_what_an_ended_one_was_writing_again(tmp_path: Path) -> None:
    checkpoint(tmp_path, 6).rename(tmp_path / ".iter_0000006.replaced")
    (tmp_path / "iter_0000006").mkdir()
    Work(SimpleNamespace(feature="whole-checkpoints")).lock(tmp_path)  # type: ignore[arg-type]
    assert state_of(tmp_path, 6, contents=True).damage == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, "iter_0000006"]


def test_a_checkpoint_that_is_written_again_in_the_background_is_not_whole_until_it_is(job: Job) -> None:
    job.save(3)
    job.save(6)
    job.args.async_save = True
    # The save is scheduled, and nothing is written yet.
    job.save(6)
    assert state_of(job.folder, 6).damage == "it was not written to its end"
    assert job.load() == "iter_0000003"
    job.async_utils.finalize()
    assert state_of(job.folder, 6, contents=True).damage == ""
    assert job.load() == "iter_0000006"


def test_a_step_that_is_saved_again_waits_for_its_first_save(job: Job) -> None:
    """Megatron saves a step twice where the number of microbatches changes."""
    job.args.async_save = True
    job.save(3)
    job.save(3)
    job.async_utils.finalize()
    assert not job.async_utils.QUEUE
    assert state_of(job.folder, 3, contents=True).damage == ""
    assert job.load() == "iter_0000003"


def test_a_first_checkpoint_that_is_killed_twice_stops_no_job(job: Job) -> None:
    job.args.async_save = True
    for _ in range(2):
        job.save(3)
        job.async_utils.QUEUE.clear()  # killed before the write
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

    # `fsync` tells which bytes of a file are on the disk.
    def fsync(descriptor: int) -> None:
        about = os.fstat(descriptor)
        synced[about.st_ino] = about.st_size

    def replace(old: Path, new: Path) -> None:
        # The rename of a manifest makes the checkpoint complete.
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


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checksums_are_made_on_request_when_all_is_written(verified: Job, asynchronous: bool) -> None:
    verified.args.async_save = asynchronous
    verified.save(3)
    path = verified.folder / "iter_0000003"
    if asynchronous:
        (request,) = verified.async_utils.QUEUE
        request.async_fn(*request.async_fn_args)  # may run in another process
        assert not (path / manifest.NAME).exists()
        assert not (verified.folder / TRACKER).exists()
        for function in request.finalize_fns:
            function()
    listed = manifest.read(path)
    assert listed is not None
    assert listed.files == manifest.sums(path, manifest.names(path))
    assert (verified.folder / TRACKER).read_text() == "3"
    content = bytearray((path / "__0_1.distcp").read_bytes())
    content[7] ^= 1
    (path / "__0_1.distcp").write_bytes(content)
    with pytest.raises(RunError, match=r"__0_1.distcp has another content than was written"):
        verified.load()


class Request(NamedTuple):
    """Megatron's ``AsyncRequest``, as far as it matters here."""

    async_fn: Any
    finalize_fns: list[Any]


def test_a_request_without_functions_at_its_end_publishes_nothing() -> None:
    """Beside ``--logits-save-dir`` the second of two requests has the functions of both."""
    save = SimpleNamespace(path=Path("iter"), process=None)
    work, scheduled = SimpleNamespace(saving=save, unfinished=set()), []
    schedule = saving.schedule_whole(scheduled.append, SimpleNamespace(state=lambda _: work))
    schedule(Request(print, []))
    (request,) = scheduled
    assert request.finalize_fns == []
    assert isinstance(request.async_fn, EndsWithJob), "the writer ends with the job all the same"
    assert work.unfinished == set()


def test_without_the_request_no_file_is_read(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    # `_sum` reads a file; any call would now fail.
    monkeypatch.delattr(manifest, "_sum")
    job.save(3)
    assert job.load() == "iter_0000003"


@pytest.mark.parametrize("listed", [True, False])
def test_a_checkpoint_without_checksums_is_not_said_to_be_verified(
    verified: Job, caplog: pytest.LogCaptureFixture, listed: bool
) -> None:
    path = checkpoint(verified.folder, 3, listed=False)
    if listed:
        manifest.complete(path, "mine", {})
    track(verified.folder, 3)
    assert verified.load() == "iter_0000003"
    (said,) = [record for record in caplog.records if "iter_0000003 is loaded" in record.getMessage()]
    assert said.levelname == "WARNING"
    assert "--verify-checkpoint compared no checksum, as it has none" in said.getMessage()
    caplog.clear()
    verified.save(6)
    assert verified.load() == "iter_0000006"
    (said,) = [record for record in caplog.records if "iter_0000006 is loaded" in record.getMessage()]
    assert said.levelname == "INFO"
    assert said.getMessage().endswith("is loaded: whole (4 files, 10.00 kB)")


def test_two_asynchronous_saves_end_one_after_the_other(job: Job) -> None:
    job.args.async_save = True
    job.save(3)
    job.save(6)
    # The tracker follows each save, not the last one scheduled.
    for done in (3, 6):
        job.async_utils.finalize()
        assert (job.folder / TRACKER).read_text() == str(done)
        assert state_of(job.folder, done, contents=True).damage == ""


def test_what_writes_in_the_background_can_be_sent_to_a_process() -> None:
    write = pickle.loads(pickle.dumps(EndsWithJob(partial(print, "x"), 0)))
    assert write.write.func is print
    write()


WRITERS = """
import multiprocessing, os, sys, time, types
from mindspeed_dsa.features.checkpoints.whole.saving import EndsWithJob, end_writer

def write():
    print(os.getpid(), flush=True)
    time.sleep(600)

work = types.SimpleNamespace(saving=types.SimpleNamespace(process=os.getpid()))
one = end_writer(write, types.SimpleNamespace(state=lambda kind: work))
target = EndsWithJob(write, os.getpid()) if sys.argv[1] == "all" else one
process = multiprocessing.get_context("fork").Process(target=target)
process.start()
process.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not end processes with their parents")
@pytest.mark.parametrize("what", ["all", pytest.param("one", marks=pytest.mark.full)])
def test_what_writes_ends_with_its_job(what: str) -> None:
    # A restarted job may write the same files, so the writer must not outlive its job.
    command = [sys.executable, "-c", WRITERS, what]
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


def test_loading_passes_over_what_is_damaged_and_restores_the_arguments(job: Job) -> None:
    assert job.load() is None
    for iteration in (3, 6):
        job.save(iteration)
    assert job.load() == "iter_0000006"
    (job.folder / "iter_0000006" / "__0_1.distcp").unlink()
    assert job.load() == "iter_0000003"
    # Loading sets `ckpt_step` for Megatron, and has to take it back.
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


def test_before_process_groups_sizes_are_compared_and_the_load_chooses_again(
    verified: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified.save(3)
    verified.save(6)
    shard = next((verified.folder / "iter_0000006").glob("*.distcp"))
    shard.write_bytes(bytes(shard.stat().st_size))
    monkeypatch.setenv("RANK", "0")
    load = verified.checkpointing._load_base_checkpoint
    assert load(str(verified.folder), verified.args, rank0=True) == "iter_0000006"
    (verified.folder / TRACKER).write_text("9")
    verified.args.ckpt_step = 3
    assert load(str(verified.folder), verified.args, rank0=True) == "iter_0000003"
    verified.args.ckpt_step = None
    monkeypatch.delenv("RANK")
    assert verified.load() == "iter_0000003"


def test_one_load_takes_one_checkpoint_although_another_job_saves(job: Job) -> None:
    job.save(3)
    load, loaded = job.checkpointing._load_base_checkpoint, []
    loaded.append(load(str(job.folder), job.args, rank0=True))
    checkpoint(job.folder, 6)
    track(job.folder, 6)
    loaded.append(load(str(job.folder), job.args, sharded_state_dict=1))
    # All calls of a load agree, although the folder has a newer checkpoint now.
    assert loaded == ["iter_0000003", "iter_0000003"]
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


OTHER = """
import pathlib, sys
from mindspeed_dsa.runs.files import Sole
held = Sole(pathlib.Path(sys.argv[1]), "x")
print("held", flush=True)
input()
"""


def test_a_folder_has_one_job_that_runs(job: Job) -> None:
    """A killed job's lock is released, although the lock file still exists."""
    job.folder.mkdir()
    command = [sys.executable, "-c", OTHER, str(job.folder / LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        host = re.escape(socket.gethostname())
        with pytest.raises(RunError, match=f"--save .* is being written by process {other.pid} on {host};"):
            job.save(3)
        other.kill()
    assert (job.folder / LOCK).exists()
    job.save(3)
    assert job.load() == "iter_0000003"


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Read-only and vanished file systems raise when the lock file is written.
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
