"""Manifests of the checkpoints that Megatron-LM writes, at once and in the background.

Megatron writes a checkpoint's files and then, in place, the tracker that names it. Here it writes the
tracker under another name, which becomes the tracker's when the manifest is there. The checkpoint before,
which ``--save-retain-interval`` has Megatron delete when it writes a tracker that named it, is deleted here
after that. Whoever writes an asynchronous save's files reads them again, for the checksums, while training
goes on.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.checkpoints.agreement import decided, is_first, together
from mindspeed_dsa.features.checkpoints.whole.feature import Options
from mindspeed_dsa.features.checkpoints.whole.work import Save, Work
from mindspeed_dsa.features.checkpoints.whole.written import Summed, forget, left
from mindspeed_dsa.log import Log
from mindspeed_dsa.runs import manifest
from mindspeed_dsa.runs.files import RunError, delete, sync
from mindspeed_dsa.runs.manifest import Entry
from mindspeed_dsa.runs.whole_checkpoints import TRACKER, name_of, remove, tracked

_deleting = threading.Lock()
"""Lock of the threads that delete checkpoints: one deletes after the other."""


def claim_before_training(context: Context[Options]) -> None:
    """Claim the folder of ``--save`` before the model is built.

    Raises:
        RunError: on all ranks: another job saves there, or nothing can be written there.
    """
    folder = context.options.save
    if folder is not None:
        claims = context.state(Work).claims
        together(lambda: claims.claim(folder) if is_first() else None, f"{context.feature}: --save {folder}")


def save_whole(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``save_checkpoint``: before and after it, and in between for :func:`schedule_whole`."""
    work = context.state(Work)

    def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> Any:
        job = context.megatron("training").get_args()
        temporary = bool(kwargs.get("non_persistent_ckpt"))
        # Others lie in each machine's own folder, with checks of its own.
        is_elsewhere = temporary and job.non_persistent_ckpt_type != "global"
        if is_elsewhere or getattr(job, "freeze_all_layers", False):  # which writes no weights
            return original(iteration, *args, **kwargs)
        name = name_of(None if kwargs.get("release") else int(iteration))
        retain = None if temporary else getattr(job, "save_retain_interval", None)
        save = begin(_folder(job, temporary), name, work, retain)
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
    """Prepare a save on all ranks: what is about to be replaced is no whole checkpoint any more."""
    token = [uuid.uuid4().hex]
    if _ranks() > 1:
        dist.broadcast_object_list(token, src=0)
    save = Save(folder, name, token[0], retain)

    def prepare() -> None:
        work.claims.claim(folder)
        if save.path.is_dir():
            manifest.withdraw(save.path, work.claims.job)
        forget(save.path)
        save.tracker.unlink(missing_ok=True)  # of a killed job; Megatron would read which one came before

    together(
        lambda: prepare() if is_first() else None, f"{work.context.feature}: {save.path} cannot be written"
    )
    return save


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def track_aside(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``get_checkpoint_tracker_filename``, which a save calls for the file to write."""
    work = context.state(Work)

    def get_checkpoint_tracker_filename(checkpoints_path: Any) -> Any:
        save = work.saving
        if save is not None and Path(checkpoints_path) == save.folder:
            return str(save.tracker)
        return original(checkpoints_path)

    return get_checkpoint_tracker_filename


def schedule_whole(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``schedule_async_save``: checksums where files are written, a manifest when all ranks have
    ended.

    Megatron calls what ends a request on all ranks, in the order in which it was added.
    """
    work = context.state(Work)

    def schedule_async_save(async_request: Any) -> Any:
        save = work.saving
        return original(async_request if save is None else listed_at_the_end(async_request, save, work))

    return schedule_async_save


def listed_at_the_end(request: Any, save: Save, work: Work) -> Any:
    """Return Megatron's ``AsyncRequest`` of a save with the sums and the manifest added to it."""
    if is_first():
        request.add_finalize_fn(lambda: end(save, work))
    if request.async_fn is None:  # this rank has nothing to write
        return request
    return request._replace(async_fn=Summed(request.async_fn, save, _rank()))


def end(save: Save, work: Work) -> None:
    """Write the manifest of an asynchronous save, of sums that others have left and the first rank's own.

    Other ranks are not here, and do not wait for it.
    """
    try:
        _publish(save, left(save.path, save.token), work)
    except OSError as error:
        raise RunError(
            f"{work.context.feature}: {save.path} cannot be written: {error}; make room, or name a folder "
            "that can be read and written"
        ) from error


def finish(save: Save, work: Work) -> None:
    """Write the manifest of a synchronous save; ranks share the reading of files whose sums are not known."""
    who = f"{work.context.feature}: {save.path} cannot be written"
    of_writing = together(lambda: left(save.path, save.token) if is_first() else {}, who)
    mine = decided(lambda: _by_size(save.path, of_writing), who)[_rank() :: _ranks()]
    shares = [together(lambda: _seen(save.path, mine), who)]
    if _ranks() > 1:
        own, shares = shares[0], [{}] * _ranks()
        dist.all_gather_object(shares, own)
    known = {name: entry for share in (of_writing, *shares) for name, entry in share.items()}
    together(lambda: _publish(save, known, work) if is_first() else None, who)


def _by_size(checkpoint: Path, but: Mapping[str, Entry]) -> list[str]:
    names = [name for name in manifest.names(checkpoint) if name not in but]
    return sorted(names, key=lambda name: -(checkpoint / name).stat().st_size)


def _seen(checkpoint: Path, names: list[str]) -> dict[str, Entry]:
    """Sum files, and bring them to the disk.

    Files that this rank's machine does not see, or not yet, are left to the first rank.
    """
    seen = [name for name in names if (checkpoint / name).is_file()]
    for name in seen:
        sync(checkpoint / name)
    return manifest.sums(checkpoint, seen)


def _publish(save: Save, known: dict[str, Entry], work: Work) -> None:
    """Write the manifest when all files are on the disk, and let the tracker name the checkpoint."""
    manifest.complete(save.path, work.claims.job, known)
    forget(save.path)
    before, _ = tracked(save.folder)
    sync(save.tracker)
    os.replace(save.tracker, save.folder / TRACKER)
    sync(save.folder)
    if save.retain and isinstance(before, int) and before > 0 and before % save.retain:
        old = save.folder / name_of(before)
        if old != save.path and not old.is_symlink():
            # As Megatron does: training does not wait for it, and the process does before it ends.
            threading.Thread(target=_remove, args=(old, work.context.log)).start()


def _remove(old: Path, log: Log) -> None:
    """Delete a checkpoint that ``--save-retain-interval`` does not keep; what cannot be deleted stays."""
    try:
        with _deleting:
            for half in old.parent.glob(".iter_*.deleted"):  # of a killed job
                with contextlib.suppress(OSError):
                    delete(half)
            remove(old)
    except OSError as error:
        log.warning("%s cannot be deleted: %s", old, error)
    else:
        log.info("deleted %s, of which --save-retain-interval keeps nothing", old)
