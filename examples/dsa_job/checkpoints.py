"""Folders of checkpoints in Megatron-LM's layout: ``iter_0000100`` etc. and a tracker file.

A checkpoint written between :func:`begin` and :func:`publish` cannot be damaged by a kill: it gets its name
after it is on disk, and the tracker names it last.
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
    """Return the step of a job's newest whole checkpoint; ``None`` if there is none.

    Raises:
        RunError: the folder cannot be read, or no checkpoint in it is whole.
    """
    choice = _find(folder)
    return choice.state.iteration if choice.state else None


def find(folder: Path, step: int | None = None, contents: bool = False) -> tuple[Path, str]:
    """Find the checkpoint of a step, by default the newest whole one, or else imported weights.

    Args:
        folder: folder of checkpoints.
        step: only step to consider.
        contents: whether to read all files of candidates, in addition to their sizes.

    Returns:
        The checkpoint's folder, and a line about skipped checkpoints or missing checksums, or an empty line.

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
    # A process killed between two renames leaves the tracked checkpoint under another name.
    if isinstance(named, int) and not is_complete(folder_of(folder, named)):
        _give_names_back(folder)
    return whole_checkpoints.choose(folder, step, contents)


def complete_steps(folder: Path) -> list[int]:
    """Return the steps of all complete checkpoints."""
    steps = ((number(path.name[5:]), path) for path in folder.glob("iter_*"))
    return sorted(step for step, path in steps if step is not None and is_complete(path))


def folder_of(folder: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return folder / f"iter_{step:07d}"


def is_complete(checkpoint: Path) -> bool:
    """Return whether a ``torch_dist`` checkpoint was written to its end."""
    # Megatron writes metadata.json last.
    return (checkpoint / "metadata.json").is_file() and (checkpoint / "common.pt").is_file()


def begin(folder: Path, step: int) -> Path:
    """Create the folder to write a checkpoint into until :func:`publish`; one process calls this.

    Raises:
        RunError: the folder cannot be written.
    """
    partial = beside(folder_of(folder, step))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except OSError as error:
        raise unwritten(folder, step, error) from error
    return partial


def unwritten(folder: Path, step: int, why: object) -> RunError:
    """Return the error for a checkpoint that could not be written."""
    return RunError(
        f"checkpoint of step {step} in {folder} was not written ({why}); earlier ones are as they were: make "
        "room, or name another folder with --save"
    )


def publish(partial: Path, step: int, verify: bool) -> Path:
    """Write the manifest, sync the checkpoint to disk, and make the tracker name it.

    Args:
        partial: checkpoint's folder so far.
        step: checkpoint's step.
        verify: whether to list checksums in addition to sizes.

    Returns:
        The checkpoint's folder.

    Raises:
        RunError: the folder cannot be written; earlier checkpoints are as they were.
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
    # The tracker changes last: after a kill before this line it still names the earlier checkpoint.
    write_atomically(final.parent / TRACKER, str(step))
    return final


def _rename(partial: Path, final: Path) -> None:
    # A process killed before the tracker named it, or an earlier run of the same steps, left an old one. The
    # tracker does not change until the new one is in place.
    old = partial.with_suffix(".replaced")
    for attempt in range(_ATTEMPTS):
        if final.exists():
            os.rename(final, old)
        try:
            os.rename(partial, final)
            break
        except OSError as error:
            # In between, a job on another machine gave the old one its name back.
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) or attempt == _ATTEMPTS - 1:
                raise
    sync(final.parent)  # or a power cut might undo the renames but not the removal
    shutil.rmtree(old, ignore_errors=True)


def _give_names_back(folder: Path) -> None:
    """Restore names of checkpoints that were moved away for a checkpoint that was never published."""
    # The process that moved them, on any machine, was killed between two renames. A running process leaves
    # this state only for an instant, and would move them away again.
    for path in sorted(folder.glob(".iter_*.replaced"), key=_written, reverse=True):  # the newest first
        match = _PARTIAL.fullmatch(path.name)
        if match and not (folder / match["name"]).exists() and is_complete(path) and not _runs_here(match):
            with contextlib.suppress(OSError):  # another user's folder, or another job was faster
                path.rename(folder / match["name"])


def _written(checkpoint: Path) -> float:
    try:
        return (checkpoint / "metadata.json").stat().st_mtime
    except OSError:
        return 0.0


def remove_partial(folder: Path) -> list[str]:
    """Delete partial checkpoints of this machine's killed processes; return the deleted names.

    A checkpoint that was moved away for one that was never published gets its name back.
    """
    _give_names_back(folder)
    removed = []
    for path in folder.glob(".iter_*"):
        match = _PARTIAL.fullmatch(path.name)
        # Processes of other machines cannot be checked, so their files stay.
        if match and match["host"] == socket.gethostname() and not _runs_here(match):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path.name)
    return removed


def _runs_here(match: re.Match[str]) -> bool:
    """Return whether the process that made a name still runs on this machine."""
    pid = int(match["pid"])
    # This process has not saved yet: its own id in a name is a reused one, as in containers.
    return match["host"] == socket.gethostname() and pid != os.getpid() and is_running(pid)
