"""Which folder a run gets: a new one, or that of an unfinished run of the same job.

``NAME``, ``NAME-2``, ``NAME-3``, ... hold one run each. Nothing that is there is ever overwritten.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mindspeed_dsa.runs.files import number, try_lock, write_atomically

RUN_FILE = "run.json"
SUMMARY = "summary.json"
"""A job writes this file last: it marks the run as finished."""
_LOCK = ".lock"
_ALONGSIDE = {"data-cache"}  # shared by all runs of this output folder


@dataclass
class Run:
    """The folder of this run.

    Attributes:
        folder: where everything of the run goes.
        resumed: whether an unfinished run is continued.
        why: one sentence for the user.
    """

    folder: Path
    resumed: bool
    why: str
    _lock: IO[str] | None = None

    def discard(self) -> None:
        """Remove a new run that has not begun."""
        self.release()
        if not self.resumed:
            (self.folder / RUN_FILE).unlink()
            (self.folder / _LOCK).unlink()
            with contextlib.suppress(OSError):  # the data cache may be there
                self.folder.rmdir()

    def release(self) -> None:
        """Let other processes have the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def open_run(
    output: Path, settings: Mapping[str, Any], latest: Callable[[Path], int | None], new_run: bool = False
) -> Run:
    """Choose the folder, create it if it is new, and lock it until the process ends.

    Args:
        output: folder of the first run.
        settings: what decides whether two runs are the same job, as JSON keeps it; ``save``, ``load`` and
            ``ckpt_step`` are compared as the checkpoint folders they mean.
        latest: returns the step of the newest complete checkpoint of the run in a folder.
        new_run: do not continue.

    Raises:
        OSError: the folder cannot be created.
    """
    last, next_number = _last(output)
    why = ""
    if last is not None:
        lock = try_lock(last / _LOCK)
        why = "in use by another process" if lock is None else _unfit(last, settings, latest, new_run)
        if not why:
            step = latest(last)
            return Run(last, True, f"resuming the unfinished run in {last} from step {step}", lock)
        if lock is not None:
            lock.close()
        why = f" ({last} is {why})"
    while True:
        folder = output if next_number == 1 else output.with_name(f"{output.name}-{next_number}")
        next_number += 1
        if not _is_free(folder):
            continue
        folder.mkdir(parents=True, exist_ok=True)
        lock = try_lock(folder / _LOCK)
        if lock is None or not _is_free(folder):  # another process was faster
            continue
        record = {"settings": dict(settings), "pid": os.getpid()}
        write_atomically(folder / RUN_FILE, json.dumps(record, indent=1))
        return Run(folder, False, f"new run in {folder}{why}", lock)


def _last(output: Path) -> tuple[Path | None, int]:
    """The newest run, and the smallest number that a new one can have."""
    numbers = [1] if (output / RUN_FILE).exists() else []
    for path in output.parent.glob(f"{glob.escape(output.name)}-*"):
        suffix = number(path.name[len(output.name) + 1 :])
        if suffix is not None and suffix > 1 and (path / RUN_FILE).exists():
            numbers.append(suffix)
    if not numbers:
        return None, 1
    newest = max(numbers)
    return (output if newest == 1 else output.with_name(f"{output.name}-{newest}")), newest + 1


def _unfit(
    folder: Path, wanted: Mapping[str, Any], latest: Callable[[Path], int | None], new_run: bool
) -> str:
    """Why a run is not continued; empty if it can be."""
    if (folder / SUMMARY).exists():
        return "finished"
    if new_run:
        return "unfinished, but --new-run was given"
    recorded = _settings_of(folder)
    if recorded is None:
        return f"unfinished, and its {RUN_FILE} is damaged{_hint(folder, latest)}"
    recorded, wanted = _plain(recorded, folder), _plain(wanted, folder)
    names = sorted(name for name in {*recorded, *wanted} if recorded.get(name) != wanted.get(name))
    if names:
        changed = ", ".join(f"{name} {recorded.get(name)} -> {wanted.get(name)}" for name in names[:4])
        return f"unfinished, with other settings: {changed}{_hint(folder, latest)}"
    if latest(folder) is None:
        return "unfinished, without a checkpoint"
    return ""


def _settings_of(folder: Path) -> dict[str, Any] | None:
    """The settings in a run's :data:`RUN_FILE`; ``None`` if that cannot be read."""
    try:
        recorded = json.loads((folder / RUN_FILE).read_bytes())["settings"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return recorded if isinstance(recorded, dict) else None


def _hint(folder: Path, latest: Callable[[Path], int | None]) -> str:
    return "" if latest(folder) is None else f"; to continue from it: --load {folder / 'checkpoints'}"


def _plain(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Settings of a run in a folder, the same whether its own checkpoints are named in them or not."""
    save = settings.get("save") or str((folder / "checkpoints").resolve())
    load = settings.get("load")
    own = load == save and settings.get("ckpt_step") is None
    return {**settings, "save": save, "load": None if own else load}


def _is_free(folder: Path) -> bool:
    if not folder.exists():
        return True
    return folder.is_dir() and not {path.name for path in folder.iterdir()} - _ALONGSIDE - {_LOCK}
