"""Which folder a run gets: a new one, or that of an unfinished run of the same job.

``NAME``, ``NAME-2``, ``NAME-3``, ... hold one run each. Nothing that is there is ever overwritten.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import glob
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dsa_job.files import number, write_atomically

RUN_FILE = "run.json"
SUMMARY = "summary.json"
_LOCK = ".lock"
_ALONGSIDE = {"data-cache"}  # shared by all runs of this output folder
# Arguments that change neither the model nor what it sees: a run may be continued with others.
_FREE = (
    "output_dir",
    "new_run",
    "log_interval",
    "no_tensorboard",
    "no_plot",
    "no_save",
    "save_interval",
    "exit_interval",
    "data_cache_path",
    "distributed_backend",
    "distributed_timeout_minutes",
    "tensor_model_parallel_size",
    "sequence_parallel",
    "pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "overlap_p2p_comm",
    "microbatch_group_size_per_vp_stage",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "align_grad_reduce",
    "align_param_gather",
    "ddp_bucket_size",
    "use_fused_dsa",
    "use_dsa_absorb",
    "use_fused_lightning_indexer",
    "use_fused_sparse_flash_attention",
    "use_fused_lightning_indexer_kl_loss",
    "dsa_backend",
    "dsa_fuse_kl_in_backward",
)


@dataclass
class Run:
    """The folder of this run.

    Attributes:
        folder: where everything of the run goes.
        resumed: whether a run that was broken off goes on.
        why: one sentence for the user.
    """

    folder: Path
    resumed: bool
    why: str
    _lock: IO[str] | None = None

    def discard(self) -> None:
        """Take back a new run that has not begun."""
        self.release()
        if not self.resumed:
            (self.folder / RUN_FILE).unlink()
            (self.folder / _LOCK).unlink()
            with contextlib.suppress(OSError):  # the data cache may lie there
                self.folder.rmdir()

    def release(self) -> None:
        """Let other processes have the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What decides whether two runs are the same job, as JSON keeps it.

    Folders of checkpoints belong to it: another one holds what another job has made.
    """
    chosen = {name: value for name, value in sorted(vars(args).items()) if name not in _FREE}
    chosen |= {name: str(Path(chosen[name]).resolve()) for name in ("save", "load") if chosen.get(name)}
    result: dict[str, Any] = json.loads(json.dumps(chosen, default=str))
    return result


def open_run(
    output: Path, wanted: dict[str, Any], latest: Callable[[Path], int | None], new_run: bool
) -> Run:
    """Choose the folder, create it if it is new, and lock it until the process ends.

    Args:
        output: ``--output-dir``.
        wanted: :func:`settings` of this job.
        latest: step of the newest complete checkpoint of the run in a folder.
        new_run: do not continue.

    Raises:
        OSError: the folder cannot be created.
    """
    last, next_number = _last(output)
    why = ""
    if last is not None:
        lock = _try_lock(last)
        why = "in use by another process" if lock is None else _unfit(last, wanted, latest, new_run)
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
        lock = _try_lock(folder)
        if lock is None or not _is_free(folder):  # another process was faster
            continue
        write_atomically(folder / RUN_FILE, json.dumps({"settings": wanted, "pid": os.getpid()}, indent=1))
        return Run(folder, False, f"new run in {folder}{why}", lock)


def _last(output: Path) -> tuple[Path | None, int]:
    """The newest run, and the number that a new one gets at least."""
    numbers = [1] if (output / RUN_FILE).exists() else []
    for path in output.parent.glob(f"{glob.escape(output.name)}-*"):
        suffix = number(path.name[len(output.name) + 1 :])
        if suffix is not None and suffix > 1 and (path / RUN_FILE).exists():
            numbers.append(suffix)
    if not numbers:
        return None, 1
    newest = max(numbers)
    return (output if newest == 1 else output.with_name(f"{output.name}-{newest}")), newest + 1


def _unfit(folder: Path, wanted: dict[str, Any], latest: Callable[[Path], int | None], new_run: bool) -> str:
    """Why a run is not continued; empty if it can be."""
    if (folder / SUMMARY).exists():
        return "finished"
    if new_run:
        return "unfinished, but --new-run was given"
    there = _settings_of(folder)
    if there is None:
        return f"unfinished, and its {RUN_FILE} is damaged{_way_on(folder, latest)}"
    there, wanted = _plain(there, folder), _plain(wanted, folder)
    names = sorted(name for name in {*there, *wanted} if there.get(name) != wanted.get(name))
    if names:
        changed = ", ".join(f"{name} {there.get(name)} -> {wanted.get(name)}" for name in names[:4])
        return f"unfinished, with other settings: {changed}{_way_on(folder, latest)}"
    if latest(folder) is None:
        return "unfinished, without a checkpoint"
    return ""


def _settings_of(folder: Path) -> dict[str, Any] | None:
    """What :func:`open_run` wrote down of a run's job; ``None`` if that cannot be read any more."""
    try:
        there = json.loads((folder / RUN_FILE).read_bytes())["settings"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return there if isinstance(there, dict) else None


def _way_on(folder: Path, latest: Callable[[Path], int | None]) -> str:
    return "" if latest(folder) is None else f"; to go on from it: --load {folder / 'checkpoints'}"


def _plain(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Settings of a run in a folder, alike whether its own checkpoints are named in them or not."""
    save = settings.get("save") or str((folder / "checkpoints").resolve())
    load = settings.get("load")
    own = load == save and settings.get("ckpt_step") is None
    return {**settings, "save": save, "load": None if own else load}


def _is_free(folder: Path) -> bool:
    if not folder.exists():
        return True
    return folder.is_dir() and not {path.name for path in folder.iterdir()} - _ALONGSIDE - {_LOCK}


def _try_lock(folder: Path) -> IO[str] | None:
    """The folder's lock, which ends with this process however it ends; ``None`` if it is held."""
    file = open(folder / _LOCK, "a")  # noqa: SIM115 - held open for as long as the run lasts
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
