"""A job of milliseconds that prints, saves and resumes as the example job does.

``python -m tests.soak.stub_job FLAGS`` soaks it. ``STUB_FAULT`` makes it do one thing wrong, which the soak
has to find. Its checkpoints and folders are the example job's own; its only weight is a number.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.soak.launcher import forks
from tests.soak.layouts import ROOT, SAVE_INTERVAL, STEPS, Layout, Place
from tests.soak.soaking import main

sys.path.insert(0, str(ROOT / "examples"))

from dsa_job import checkpoints, folders

from mindspeed_dsa.runs.files import RunError

_STEP_S = 0.01
_WRITE_S = float(os.environ.get("STUB_WRITE_S", "0.05"))
_SHARD = 20_000  # numbers, so that a full disk has no room for them
FAULT = os.environ.get("STUB_FAULT", "")


def rank(layout: Layout, place: Place) -> int:
    """Train on rank 0; other ranks wait for it."""
    number = int(os.environ["RANK"])
    here = place.run.parent
    over = here / f"over-{os.environ['MASTER_PORT']}"

    if FAULT == "traceback":
        signal.signal(signal.SIGTERM, _fail)
    if number:
        parent = os.getppid()
        while os.getppid() == parent and not over.exists():
            time.sleep(_STEP_S)
        return int(not over.exists())
    if FAULT == "orphan":
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    settings = {"pid": os.getpid()} if FAULT == "anew" else {}
    run = folders.open_run(place.run, settings, lambda folder: checkpoints.latest(folder / "checkpoints"))
    print(run.why, flush=True)
    try:
        _train(run)
        over.touch()
    except (OSError, RunError) as error:
        print(error, flush=True)
        return 2
    return 0


def _fail(*_: object) -> None:
    print("Traceback (most recent call last)\nValueError: a bad batch", flush=True)
    os._exit(1)


def _train(run: folders.Run) -> None:
    saved, metrics = run.folder / "checkpoints", run.folder / "metrics.jsonl"
    step, weight = 0, 1
    if run.resumed:
        checkpoints.remove_partial(saved)
        checkpoint, passed = checkpoints.find(saved, contents=True)
        if FAULT == "unread":
            checkpoint, passed = max(saved.glob("iter_*")), ""
        if passed:
            print(f"checkpoint: {passed}", flush=True)
        step, weight = json.loads((checkpoint / "common.pt").read_text())
        weight += FAULT == "other weights"
        lines = metrics.read_text().splitlines()[:step]
        metrics.write_text("".join(f"{line}\n" for line in lines))
    name: Callable[[], None] | None = None
    while step < STEPS:
        time.sleep(1000 if FAULT == "hang" and step == SAVE_INTERVAL else _STEP_S)
        step, weight = step + 1, weight * 3 % 1_000_003
        with open(metrics, "a") as file:
            figures = {"step": step, "lm_loss": weight, "indexer_loss": 0, "grad_norm": 0}
            print(json.dumps(figures), file=file)
        print(f"step {step:5d}/{STEPS}", flush=True)
        if name is not None:
            name()
        name = _save(saved, step, weight) if step % SAVE_INTERVAL == 0 else None
    if name is not None:
        name()


def _save(folder: Path, step: int, weight: int) -> Callable[[], None]:
    """Begin to write a checkpoint in another process; return a function that waits and names it."""
    partial = checkpoints.begin(folder, step)
    (partial / "common.pt").write_text(json.dumps([step, weight]))
    (partial / "metadata.json").write_text("{}")
    parent, writer = os.getpid(), os.fork()
    if writer == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_WRITE_S)
        with contextlib.suppress(OSError):
            if os.getppid() == parent:
                (partial / "__0_0.distcp").write_text(json.dumps([weight] * _SHARD))
                os._exit(0)
        os._exit(1)

    def name() -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1])
        if code:
            why = "No space left on device" if code == 1 else "its writer has ended without a word"
            raise RunError(f"checkpoint {partial} was not written ({why})")
        # With checksums, by which a resumed run finds a flipped bit.
        checkpoints.publish(partial, step, verify=True)

    return name


if __name__ == "__main__":
    sys.exit(main(command=forks(rank)))
