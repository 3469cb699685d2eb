"""Manifests of the checkpoints that Megatron-LM writes, at once and in the background.

Megatron writes a checkpoint's files and then, in place, the tracker that names it. Here it writes the
tracker under another name, which becomes the tracker's when the manifest is there. Whoever writes an
asynchronous save's files reads them again, for the checksums, while training goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.checkpoints.agreement import together
from mindspeed_dsa.features.checkpoints.whole.claims import Claims
from mindspeed_dsa.features.checkpoints.whole.feature import Options
from mindspeed_dsa.runs import manifest
from mindspeed_dsa.runs.files import RunError, sync, write_atomically
from mindspeed_dsa.runs.manifest import Entry
from mindspeed_dsa.runs.whole_checkpoints import TRACKER, Choice, name_of, tracked


@dataclass(frozen=True)
class Save:
    """A checkpoint that is being written.

    Attributes:
        folder: of all checkpoints.
        name: of this one.
        token: other than that of any other save; the same on all ranks.
    """

    folder: Path
    name: str
    token: str

    @property
    def path(self) -> Path:
        """Where its files are."""
        return self.folder / self.name

    @property
    def tracker(self) -> Path:
        """The file that Megatron writes in place of the tracker."""
        return self.folder / f".{TRACKER}.{self.name}"


@dataclass
class Work:
    """State that the feature's implementations share.

    Attributes:
        context: of the feature.
        saving: the save whose call of Megatron is running.
        choices: what is loaded, by folder and by what ``--ckpt-step`` says.
        claims: folders that this job saves into.
    """

    context: Context[Options]
    saving: Save | None = None
    choices: dict[tuple[Path, int | None], Choice] = field(default_factory=dict)
    claims: Claims = field(default_factory=Claims)


def claim_before_training(context: Context[Options]) -> None:
    """Claim the folder of ``--save`` before the model is built.

    Raises:
        RunError: on all ranks: another job saves there, or nothing can be written there.
    """
    folder = context.options.save
    if folder is not None:
        claims = context.state(Work).claims
        together(
            lambda: claims.claim(folder) if _rank() == 0 else None, f"{context.feature}: --save {folder}"
        )


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
        save = begin(_folder(job, temporary), name, work)
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


def begin(folder: Path, name: str, work: Work) -> Save:
    """Prepare a save on all ranks: what is about to be replaced is no whole checkpoint any more."""
    token = [uuid.uuid4().hex]
    if _ranks() > 1:
        dist.broadcast_object_list(token, src=0)
    save = Save(folder, name, token[0])

    def prepare() -> None:
        work.claims.claim(folder)
        (save.path / manifest.NAME).unlink(missing_ok=True)
        for left in save.path.glob(f"{manifest.SUMS}*"):
            left.unlink()
        latest, wrong = tracked(folder)
        if latest is not None and not wrong:  # Megatron reads which one came before
            shutil.copyfile(folder / TRACKER, save.tracker)

    together(
        lambda: prepare() if _rank() == 0 else None, f"{work.context.feature}: {save.path} cannot be written"
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
    if _rank() == 0:
        request.add_finalize_fn(lambda: end(save, work))
    if request.async_fn is None:  # this rank has nothing to write
        return request
    return request._replace(async_fn=Summed(request.async_fn, str(save.path), save.token, _rank()))


@dataclass(frozen=True)
class Summed:
    """Function of a process that writes one rank's files, with their checksums after them.

    Attributes:
        write: Megatron's, which can be pickled as this can.
        folder: of the checkpoint.
        token: of the save.
        rank: whose files, named ``__RANK_*`` by torch.
    """

    write: Callable[..., Any]
    folder: str
    token: str
    rank: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Write files, and their sums beside them; sums that cannot be made are left to the first rank."""
        result = self.write(*args, **kwargs)
        with contextlib.suppress(OSError):
            folder = Path(self.folder)
            files = [path.name for path in folder.glob(f"__{self.rank}_*")]
            found = {name: [each.size, each.crc32] for name, each in manifest.sums(folder, files).items()}
            content = {"token": self.token, "files": found}
            write_atomically(folder / f"{manifest.SUMS}{self.rank}", json.dumps(content))
        return result


def end(save: Save, work: Work) -> None:
    """Write the manifest of an asynchronous save, of sums that others have left and the first rank's own.

    Other ranks are not here, and do not wait for it.
    """
    try:
        known: dict[str, Entry] = {}
        for left in save.path.glob(f"{manifest.SUMS}*"):
            content = json.loads(left.read_text(encoding="utf-8"))
            if content["token"] == save.token:
                known.update({name: Entry(*facts) for name, facts in content["files"].items()})
        _publish(save, known, work)
    except OSError as error:
        raise RunError(
            f"{work.context.feature}: {save.path} cannot be written: {error}; make room, or name a folder "
            "that can be read and written"
        ) from error


def finish(save: Save, work: Work) -> None:
    """Write the manifest of a synchronous save; ranks share the reading."""
    who = f"{work.context.feature}: {save.path} cannot be written"
    told = [together(lambda: _by_size(save.path) if _rank() == 0 else [], who)]
    if _ranks() > 1:
        dist.broadcast_object_list(told, src=0)
    mine = told[0][_rank() :: _ranks()]
    shares = [together(lambda: _seen(save.path, mine), who)]
    if _ranks() > 1:
        own, shares = shares[0], [{}] * _ranks()
        dist.all_gather_object(shares, own)
    known = {name: entry for share in shares for name, entry in share.items()}
    together(lambda: _publish(save, known, work) if _rank() == 0 else None, who)


def _by_size(checkpoint: Path) -> list[str]:
    return sorted(manifest.names(checkpoint), key=lambda name: -(checkpoint / name).stat().st_size)


def _seen(checkpoint: Path, names: list[str]) -> dict[str, Entry]:
    """Sum files; those that this rank's machine does not see, or not yet, are left to the first rank."""
    return manifest.sums(checkpoint, [name for name in names if (checkpoint / name).is_file()])


def _publish(save: Save, known: dict[str, Entry], work: Work) -> None:
    """Write the manifest, and let the tracker name the checkpoint."""
    names = manifest.names(save.path)
    rest = [name for name in names if name not in known]
    files = {name: known[name] for name in names if name in known} | manifest.sums(save.path, rest)
    manifest.write(save.path, work.claims.job, files)
    for left in save.path.glob(f"{manifest.SUMS}*"):
        left.unlink()
    sync(save.tracker)
    os.replace(save.tracker, save.folder / TRACKER)
    sync(save.folder)
