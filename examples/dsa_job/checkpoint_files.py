"""Checkpoints as folders: which one is the newest, which are whole, which were left half written."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
from pathlib import Path

from dsa_job.errors import UsageError
from dsa_job.files import number

TRACKER = "latest_checkpointed_iteration.txt"
_SHOWN = 40  # characters of a damaged file that a message repeats
_PARTIAL = re.compile(r"\.(?P<name>iter_\d+)\.(?P<host>.+)-(?P<pid>\d+)\.(?P<kind>partial|replaced)")


def latest(folder: Path) -> int | None:
    """Step of the newest complete checkpoint; ``None`` if there is none.

    Raises:
        UsageError: the tracker file cannot be read, or names a checkpoint that is not there.
    """
    try:
        text = (folder / TRACKER).read_bytes().decode("ascii", errors="backslashreplace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(
            f"{folder / TRACKER} cannot be read ({error.strerror or error}); name a folder that holds "
            "checkpoints"
        ) from error
    step = number(text)
    if step is None or not is_complete(folder_of(folder, step)):
        said = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        raise UsageError(
            f"{folder / TRACKER} says {said!r}, and there is no complete checkpoint of that name; "
            f"complete ones: {complete_steps(folder) or 'none'}; choose one with --ckpt-step, or write its "
            "number into that file"
        )
    return step


def of_run(args: argparse.Namespace, folder: Path) -> Path:
    """Where the run in a folder keeps its checkpoints."""
    return Path(args.save) if args.save else folder / "checkpoints"


def check_not_overwritten(args: argparse.Namespace) -> None:
    """Keep the checkpoints in ``--save`` from being replaced by those of a job that does not go on from them.

    Raises:
        UsageError: there are some, and the job would write the same steps again.
    """
    there = latest(Path(args.save)) if args.save and not args.no_save else None
    if there is None:
        return
    goes_on = args.train_iters and in_place(args) and not args.finetune
    if not goes_on or args.ckpt_step not in (None, there):
        remedy = f", or go on from them with --load {args.save}" if args.train_iters else ""
        raise UsageError(
            f"--save {args.save} holds checkpoints up to step {there}, which this job would replace; name "
            f"another folder{remedy}"
        )


def in_place(args: argparse.Namespace) -> bool:
    """Whether a job saves where it loads from."""
    return bool(args.load and args.save) and Path(args.load).resolve() == Path(args.save).resolve()


def complete_steps(folder: Path) -> list[int]:
    """Steps of all complete checkpoints."""
    steps = ((number(path.name[5:]), path) for path in folder.glob("iter_*"))
    return sorted(step for step, path in steps if step is not None and is_complete(path))


def folder_of(folder: Path, iteration: int) -> Path:
    """Folder of one checkpoint."""
    return folder / f"iter_{iteration:07d}"


def is_complete(checkpoint: Path) -> bool:
    """Whether everything was written; Megatron writes ``metadata.json`` last."""
    return (checkpoint / "metadata.json").is_file() and (checkpoint / "common.pt").is_file()


def remove_partial(folder: Path) -> list[str]:
    """Delete what killed processes of this machine left half written; names of what was deleted.

    A checkpoint that had made room for one that never came gets its name back.
    """
    removed = []
    for path in folder.glob(".iter_*"):
        match = _PARTIAL.fullmatch(path.name)
        if match and match["host"] == socket.gethostname() and not _is_alive(int(match["pid"])):
            final = folder / match["name"]
            if match["kind"] == "replaced" and not final.exists() and is_complete(path):
                path.rename(final)
                continue
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path.name)
    return removed


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


def partial_name(final: Path) -> str:
    """Name of a checkpoint while this process writes it; says whose it is."""
    return f".{final.name}.{socket.gethostname()}-{os.getpid()}.partial"
