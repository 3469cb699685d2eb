"""Choice of a run's folder: a new one, or the folder of an unfinished run of the same job.

``NAME``, ``NAME-2``, ``NAME-3``, ... hold one run each. Existing files are never overwritten.
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
"""File that a job writes last: it marks the run as finished."""
_LOCK = ".lock"
_ALONGSIDE = {"data-cache"}  # shared by all runs of this output folder


@dataclass
class Run:
    """Folder of this run.

    Attributes:
        folder: folder for all files of the run.
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
        """Release the lock, so that other processes can use the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def open_run(
    output: Path, settings: Mapping[str, Any], latest: Callable[[Path], int | None], new_run: bool = False
) -> Run:
    """Choose the folder, create it if it is new, and lock it until the process ends.

    Args:
        output: folder of the first run.
        settings: JSON values that identify a job. ``save``, ``load`` and ``ckpt_step`` are compared by the
            checkpoint folders that they resolve to.
        latest: function that returns the step of the newest complete checkpoint of the run in a folder.
        new_run: whether to start a new run in any case.

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
    """Return the newest run, and the smallest number available for a new one."""
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
    """Return why a run is not continued; empty if it can be."""
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
    """Return the settings in a run's :data:`RUN_FILE`; ``None`` if it cannot be read."""
    try:
        recorded = json.loads((folder / RUN_FILE).read_bytes())["settings"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return recorded if isinstance(recorded, dict) else None


def _hint(folder: Path, latest: Callable[[Path], int | None]) -> str:
    return "" if latest(folder) is None else f"; to continue from it: --load {folder / 'checkpoints'}"


def _plain(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Normalize a run's settings: its own checkpoint folder may be given by flags or by default."""
    save = settings.get("save") or str((folder / "checkpoints").resolve())
    load = settings.get("load")
    # Loading the newest checkpoint of its own folder is a resume, not another source of weights.
    own = load == save and settings.get("ckpt_step") is None
    return {**settings, "save": save, "load": None if own else load}


def _is_free(folder: Path) -> bool:
    if not folder.exists():
        return True
    return folder.is_dir() and not {path.name for path in folder.iterdir()} - _ALONGSIDE - {_LOCK}
