"""Folders of checkpoints as Megatron-LM lays them out: ``iter_0000100`` etc. and a tracker file.

A checkpoint written between :func:`begin` and :func:`publish` cannot be damaged by a kill: it gets its
name when it is on disk, and the tracker names it last.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
from pathlib import Path

from mindspeed_dsa.runs import manifest, whole_checkpoints
from mindspeed_dsa.runs.files import RunError, beside, is_running, number, sync, write_atomically
from mindspeed_dsa.runs.whole_checkpoints import TRACKER, Choice

_ATTEMPTS = 3
_PARTIAL = re.compile(
    r"\.(?P<name>iter_\d+)\.(?P<host>.+)-(?P<pid>\d+)(\.[0-9a-f]{12})?\.(?P<kind>partial|replaced)"
)


def latest(folder: Path) -> int | None:
    """Step of the newest whole checkpoint of a job; ``None`` if there is none.

    Raises:
        RunError: the folder cannot be read, or no checkpoint in it is whole.
    """
    choice = _find(folder)
    return choice.state.iteration if choice.state else None


def find(folder: Path, step: int | None = None, contents: bool = False) -> tuple[Path, str]:
    """Find the checkpoint of a step, by default the newest whole one, or else imported weights.

    Args:
        folder: of checkpoints.
        step: this one alone.
        contents: read all files of those that come into question, besides their sizes.

    Returns:
        Its folder, and a line about those that were passed over, or about checksums that it lacks; an empty
        one if there is neither.

    Raises:
        RunError: it is missing or damaged.
    """
    choice = _find(folder, step, contents)
    if choice.state is None:
        raise RunError(
            f"{folder} has no complete checkpoint; complete ones: {complete_steps(folder) or 'none'}"
        )
    is_worth_a_line = choice.passed or choice.unverified
    return choice.state.path, whole_checkpoints.describe(folder, choice) if is_worth_a_line else ""


def _find(folder: Path, step: int | None = None, contents: bool = False) -> Choice:
    named = whole_checkpoints.tracked(folder)[0] if step is None else step
    if isinstance(named, int) and not is_complete(folder_of(folder, named)):
        _give_names_back(folder)
    return whole_checkpoints.choose(folder, step, contents)


def complete_steps(folder: Path) -> list[int]:
    """Steps of all complete checkpoints."""
    steps = ((number(path.name[5:]), path) for path in folder.glob("iter_*"))
    return sorted(step for step, path in steps if step is not None and is_complete(path))


def folder_of(folder: Path, step: int) -> Path:
    """Folder of one checkpoint."""
    return folder / f"iter_{step:07d}"


def is_complete(checkpoint: Path) -> bool:
    """Whether a ``torch_dist`` checkpoint was written to its end; Megatron writes ``metadata.json`` last."""
    return (checkpoint / "metadata.json").is_file() and (checkpoint / "common.pt").is_file()


def begin(folder: Path, step: int) -> Path:
    """Create the folder to write a checkpoint into until :func:`publish`; one process calls this.

    Raises:
        RunError: nothing can be written there.
    """
    partial = beside(folder_of(folder, step))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except OSError as error:
        raise unwritten(folder, step, error) from error
    return partial


def unwritten(folder: Path, step: int, why: object) -> RunError:
    """Return the error of a checkpoint that could not be written."""
    return RunError(
        f"checkpoint of step {step} in {folder} was not written ({why}); earlier ones are as they were: make "
        "room, or name another folder with --save"
    )


def publish(partial: Path, step: int, verify: bool) -> Path:
    """List what was written since :func:`begin`, bring it to the disk, and let the tracker name it.

    Args:
        partial: its folder until now.
        step: of the checkpoint.
        verify: list checksums beside sizes.

    Returns:
        The checkpoint's folder.

    Raises:
        RunError: nothing can be written there; earlier checkpoints are as they were.
    """
    try:
        return _publish(partial, step, verify)
    except OSError as error:
        raise unwritten(partial.parent, step, error) from error


def _publish(partial: Path, step: int, verify: bool) -> Path:
    final = folder_of(partial.parent, step)
    summed = manifest.sums(partial, manifest.names(partial)) if verify else {}
    manifest.complete(partial, f"{socket.gethostname()}-{os.getpid()}", summed, final.name)
    _rename(partial, final)
    write_atomically(final.parent / TRACKER, str(step))
    return final


def _rename(partial: Path, final: Path) -> None:
    # An old one was left by a process killed before the tracker named it, or by an earlier run of the same
    # steps; the tracker does not change until the new one is in place.
    old = partial.with_suffix(".replaced")
    for attempt in range(_ATTEMPTS):
        if final.exists():
            os.rename(final, old)
        try:
            os.rename(partial, final)
            break
        except OSError as error:
            # A job on another machine came between the two, and gave the old one its name back.
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) or attempt == _ATTEMPTS - 1:
                raise
    sync(final.parent)  # or a power cut might undo the renames and not the removal
    shutil.rmtree(old, ignore_errors=True)


def _give_names_back(folder: Path) -> None:
    """Give checkpoints that were moved away for one that was never published their names back.

    Whoever moved them, on whatever machine, was killed between two renames: a process that runs is there only
    for an instant, and moves them away once more.
    """
    for path in sorted(folder.glob(".iter_*.replaced"), key=_written, reverse=True):  # the newest first
        match = _PARTIAL.fullmatch(path.name)
        if match and not (folder / match["name"]).exists() and is_complete(path) and not _runs_here(match):
            with contextlib.suppress(OSError):  # a folder of others, or another job was faster
                path.rename(folder / match["name"])


def _written(checkpoint: Path) -> float:
    try:
        return (checkpoint / "metadata.json").stat().st_mtime
    except OSError:
        return 0.0


def remove_partial(folder: Path) -> list[str]:
    """Delete what killed processes of this machine left half written; names of what was deleted.

    A checkpoint that was moved away for one that was never published gets its name back.
    """
    _give_names_back(folder)
    removed = []
    for path in folder.glob(".iter_*"):
        match = _PARTIAL.fullmatch(path.name)
        if match and match["host"] == socket.gethostname() and not _runs_here(match):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path.name)
    return removed


def _runs_here(match: re.Match[str]) -> bool:
    """Whether what a name was made by is a process of this machine that still runs."""
    pid = int(match["pid"])
    return match["host"] == socket.gethostname() and pid != os.getpid() and is_running(pid)
