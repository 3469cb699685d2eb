"""Manifests for checkpoints that Megatron-LM saves synchronously or asynchronously.

Megatron writes a checkpoint's files and then overwrites the tracker that names it. With this module Megatron
writes the tracker to a temporary file, which is renamed once the manifest is written. With
``--save-retain-interval`` stock Megatron deletes the previous checkpoint when it updates the tracker. This
module deletes it after the rename.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.checkpoints.agreement import decided, is_first, together
from mindspeed_dsa.features.checkpoints.whole.feature import Options
from mindspeed_dsa.features.checkpoints.whole.work import Save, Work
from mindspeed_dsa.log import Log
from mindspeed_dsa.runs import manifest
from mindspeed_dsa.runs.files import delete, end_with_parent, sync
from mindspeed_dsa.runs.manifest import Entry
from mindspeed_dsa.runs.whole_checkpoints import TRACKER, is_tracked, name_of, put_aside, replaced, tracked

_deleting = threading.Lock()
"""Lock that serializes the threads that delete checkpoints."""


def lock_before_training(context: Context[Options]) -> None:
    """Lock the folder of ``--save`` before the model is built.

    Raises:
        RunError: on all ranks, if another job saves there or the folder is not writable.
    """
    folder = context.options.save
    if folder is not None:
        work = context.state(Work)
        together(lambda: work.lock(folder) if is_first() else None, f"{context.feature}: --save {folder}")


def save_whole(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``save_checkpoint`` to write a manifest; asynchronous saves use :func:`schedule_whole`."""
    work = context.state(Work)

    def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> Any:
        job = context.megatron("training").get_args()
        temporary = bool(kwargs.get("non_persistent_ckpt"))
        # Local checkpoints are in a folder per machine and have their own validity checks.
        is_elsewhere = temporary and job.non_persistent_ckpt_type != "global"
        # `freeze_all_layers` writes no weights.
        if is_elsewhere or getattr(job, "freeze_all_layers", False):
            return original(iteration, *args, **kwargs)
        name = name_of(None if kwargs.get("release") else int(iteration))
        retain = None if temporary else getattr(job, "save_retain_interval", None)
        folder = _folder(job, temporary)
        if folder / name in work.unfinished:
            # Megatron saves a step again where the number of microbatches changes.
            context.megatron("training.async_utils").maybe_finalize_async_save(blocking=True)
        save = begin(folder, name, work, retain)
        work.saving = save
        work.choices.clear()
        try:
            result = original(iteration, *args, **kwargs)
        finally:
            work.saving = None
        if not job.async_save:
            finish(save, work)
        return result

    return save_checkpoint


def _folder(job: Any, temporary: bool) -> Path:
    if not temporary:
        return Path(job.save)
    own = job.non_persistent_global_ckpt_dir
    return Path(own) if own else Path(job.save, "non_persistent")


def begin(folder: Path, name: str, work: Work, retain: int | None = None) -> Save:
    """Prepare a save on all ranks; an existing checkpoint of the same name is moved aside."""
    save = Save(folder, name, retain)

    def prepare() -> None:
        work.lock(folder)
        if save.path.is_dir() and not save.path.is_symlink():
            # Megatron would overwrite its files, and a kill could leave a mixture of new and old files. The
            # old checkpoint may be the only one, so it stays until the new one is whole.
            if replaced(save.path).is_dir():  # a save of this job failed: these files are of no use
                _remove(save.path, f"the unfinished {save.path}", work.context.log)
            else:
                save.path.rename(replaced(save.path))
        if is_tracked(folder, name) or save.path.is_dir():  # a link to a checkpoint stays
            # An empty manifest marks it as unfinished. Without one, the next job would take a tracked
            # checkpoint for one that stock Megatron wrote.
            save.path.mkdir(exist_ok=True)
            manifest.write(save.path, work.job, {})
        # Left by a killed job; Megatron would read it to find the previous checkpoint.
        save.tracker.unlink(missing_ok=True)

    together(
        lambda: prepare() if is_first() else None, f"{work.context.feature}: {save.path} cannot be written"
    )
    return save


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def track_aside(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``get_checkpoint_tracker_filename`` to redirect a save's tracker to a temporary file."""
    work = context.state(Work)

    def get_checkpoint_tracker_filename(checkpoints_path: Any) -> Any:
        save = work.saving
        if save is not None and Path(checkpoints_path) == save.folder:
            return str(save.tracker)
        return original(checkpoints_path)

    return get_checkpoint_tracker_filename


def schedule_whole(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``schedule_async_save`` to write the manifest after all ranks have written their files."""
    work = context.state(Work)
    # Megatron calls finalize functions on all ranks, in the order in which they were added.

    def schedule_async_save(async_request: Any) -> Any:
        save = work.saving
        return original(async_request if save is None else listed_at_the_end(async_request, save, work))

    return schedule_async_save


def listed_at_the_end(request: Any, save: Save, work: Work) -> Any:
    """Return Megatron's ``AsyncRequest``, extended to write the manifest when the save is finalized."""
    # With --logits-save-dir, Megatron gives all functions to the second of two requests of a save.
    if request.finalize_fns:
        work.unfinished.add(save.path)
        request.add_finalize_fn(lambda: finish(save, work))
    if request.async_fn is None:  # this rank has nothing to write
        return request
    return request._replace(async_fn=EndsWithJob(request.async_fn, save.process))


@dataclass(frozen=True)
class EndsWithJob:
    """Wrapper of a function for a writer process; the process is killed when its job ends.

    Attributes:
        write: Megatron's function; it must be picklable, like this object.
        process: id of the training process that starts the writer process.
    """

    write: Callable[..., Any]
    process: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Tie this process's lifetime to its parent, then call :attr:`write`."""
        # A surviving writer could write the same files as the next job.
        parent = multiprocessing.parent_process()
        if os.getpid() != self.process and parent is not None and not end_with_parent(parent.pid or 0):
            os._exit(1)
        return self.write(*args, **kwargs)


def end_writer(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``FileSystemWriterAsync.write_preloaded_data`` to end its writer processes with the job."""
    work = context.state(Work)

    def write_preloaded_data(*args: Any, **kwargs: Any) -> Any:
        save = work.saving
        write = original if save is None else EndsWithJob(original, save.process)
        return write(*args, **kwargs)

    return write_preloaded_data


def finish(save: Save, work: Work) -> None:
    """Write the manifest of a save; with ``--verify-checkpoint`` the ranks divide the checksum work."""
    who = f"{work.context.feature}: {save.path} cannot be written"
    work.unfinished.discard(save.path)
    summed: dict[str, Entry] = {}
    if work.context.options.verify:
        # Largest files first, dealt out round robin.
        mine = decided(lambda: _by_size(save.path), who)[_rank() :: _ranks()]
        shares = [together(lambda: _seen(save.path, mine), who)]
        if _ranks() > 1:
            own, shares = shares[0], [{}] * _ranks()
            dist.all_gather_object(shares, own)
        summed = {name: entry for share in shares for name, entry in share.items()}
    together(lambda: _publish(save, summed, work) if is_first() else None, who)


def _by_size(checkpoint: Path) -> list[str]:
    files = manifest.sizes(checkpoint)
    return sorted(files, key=lambda name: -files[name].size)


def _seen(checkpoint: Path, names: list[str]) -> dict[str, Entry]:
    """Return checksums of those files in ``names`` that are visible on this rank's machine."""
    # The first rank does the rest: a shared folder may show new files late.
    return manifest.sums(checkpoint, [name for name in names if (checkpoint / name).is_file()])


def _publish(save: Save, summed: dict[str, Entry], work: Work) -> None:
    """Write the manifest, then rename the tracker into place so that it names the checkpoint."""
    if work.context.options.verify:
        rest = [name for name in manifest.names(save.path) if name not in summed]
        summed = {**summed, **manifest.sums(save.path, rest)}
    manifest.complete(save.path, work.job, summed)
    before, _ = tracked(save.folder)
    # Sync the file before the rename and the folder after it: a crash leaves the old or the new tracker.
    sync(save.tracker)
    os.replace(save.tracker, save.folder / TRACKER)
    # Megatron's rule: an old checkpoint stays if its iteration is a multiple of --save-retain-interval.
    sync(save.folder)
    if (aside := replaced(save.path)).is_dir():
        _remove(aside, f"what {save.path} was before", work.context.log)
    if save.retain and isinstance(before, int) and before > 0 and before % save.retain:
        old = save.folder / name_of(before)
        if old != save.path and not old.is_symlink():
            _remove(old, f"{old}, of which --save-retain-interval keeps nothing", work.context.log)


def _remove(old: Path, what: str, log: Log) -> None:
    """Delete a folder in a thread, so that training continues; only warn on failure.

    The process waits for it at exit.
    """
    try:
        aside = put_aside(old)
    except OSError as error:
        log.warning("%s cannot be deleted: %s", old, error)
    else:
        threading.Thread(target=_delete, args=(aside, what, log)).start()


def _delete(aside: Path, what: str, log: Log) -> None:
    try:
        with _deleting:
            for half in aside.parent.glob(".iter_*.deleted"):  # left by a killed job
                with contextlib.suppress(OSError):
                    delete(half)
            delete(aside)
    except OSError as error:
        log.warning("%s cannot be deleted: %s", aside, error)
    else:
        log.info("deleted %s", what)
