"""Checksums of a distributed checkpoint's files, made of the bytes that Megatron writes while it writes them.

Each file's is left beside it, by whichever process has written the file, until the manifest is written. Files
without one, such as those of other formats, are read again.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.checkpoints.whole.feature import Options
from mindspeed_dsa.features.checkpoints.whole.work import Save, Work
from mindspeed_dsa.runs import manifest
from mindspeed_dsa.runs.files import beside, end_with_parent, sync
from mindspeed_dsa.runs.manifest import Entry, Summing


def sum_a_file(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``FileSystemWriterAsync.write_preloaded_data``, which writes one file."""
    work = context.state(Work)

    def write_preloaded_data(*args: Any, **kwargs: Any) -> Any:
        save = work.saving
        if save is None:
            return original(*args, **kwargs)
        _end_with(save)
        work.open.close()
        try:
            return original(*args, **kwargs)
        finally:
            stream = work.open.close()
            if stream is not None:
                leave(Path(stream.name), stream.entry, save.token)

    return write_preloaded_data


def sum_an_item(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``_write_item``, which writes a tensor to a stream: its first argument but for transforms."""
    work = context.state(Work)

    def _write_item(*args: Any, **kwargs: Any) -> Any:
        at = next((at for at, each in enumerate(args) if hasattr(each, "write")), None)
        if work.saving is None or at is None:
            return original(*args, **kwargs)
        if work.open.stream is None:
            work.open.stream = Summing(args[at])
        return original(*args[:at], work.open.stream, *args[at + 1 :], **kwargs)

    return _write_item


def _end_with(save: Save) -> None:
    """End a process that writes for a save when its job is killed: the next one may write the same files."""
    parent = multiprocessing.parent_process()
    if os.getpid() != save.process and parent is not None and not end_with_parent(parent.pid or 0):
        os._exit(1)


def leave(file: Path, entry: Entry, token: str) -> None:
    """Leave the checksum of a file that is on the disk beside it, unless more was written than was summed."""
    with contextlib.suppress(OSError):  # then it is read again
        if file.stat().st_size == entry.size:
            sync(file)  # Megatron did before it closed the file, without what Python still had in a buffer
            content = {"token": token, "files": {file.name: [entry.size, entry.crc32]}}
            unfinished = beside(file.with_name(f"{manifest.NAME}.{file.name}"))
            unfinished.write_text(json.dumps(content), encoding="utf-8")
            os.replace(unfinished, file.with_name(f"{manifest.SUMS}{file.name}"))


def left(checkpoint: Path, token: str) -> dict[str, Entry]:
    """Return the checksums that were left of files of a save.

    Args:
        checkpoint: its folder.
        token: of the save; what is left of others is not heard.

    Raises:
        OSError: one cannot be read.
    """
    known: dict[str, Entry] = {}
    for file in checkpoint.glob(f"{manifest.SUMS}*"):
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["token"] == token:
            known.update({name: Entry(*facts) for name, facts in content["files"].items()})
    return known


def forget(checkpoint: Path) -> None:
    """Remove the checksums that were left in a checkpoint's folder, of any save.

    Raises:
        OSError: one cannot be removed.
    """
    for file in checkpoint.glob(f"{manifest.SUMS}*"):
        file.unlink()


@dataclass(frozen=True)
class Summed:
    """Function of a process that writes one rank's files, with their checksums after them.

    A process that was not forked knows nothing of this session: there files are read when they are written.

    Attributes:
        write: Megatron's, which can be pickled as this can.
        save: that they belong to.
        rank: whose files, named ``__RANK_*`` by torch.
    """

    write: Callable[..., Any]
    save: Save
    rank: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Write files, and their sums beside them; sums that cannot be made are left to the first rank."""
        _end_with(self.save)
        result = self.write(*args, **kwargs)
        with contextlib.suppress(OSError):
            folder, token = self.save.path, self.save.token
            known = left(folder, token)
            files = [path.name for path in folder.glob(f"__{self.rank}_*") if path.name not in known]
            for name, entry in manifest.sums(folder, files).items():
                leave(folder / name, entry, token)
        return result
