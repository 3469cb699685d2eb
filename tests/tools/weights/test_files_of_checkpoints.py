"""Files of a checkpoint: regions are read across them, and a full disk is named."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from mindspeed_dsa.features.checkpoints.hugging_face.torch_dist_files import Checkpoint
from mindspeed_dsa.runs.files import RunError
from mindspeed_dsa.tools.weights import importing


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one process act as all ranks."""

    def gather(everything: list[Any], own: Any) -> None:
        everything[:] = [own]

    alone = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 1, all_gather_object=gather)
    monkeypatch.setattr(importing, "dist", alone)


def save(folder: Path, *tensors: tuple[int, torch.Tensor]) -> None:
    """Write rows of a tensor ``x`` of 8 x 100 at their places."""
    pieces: Any = [
        SimpleNamespace(key="x", size=(8, 100), offset=(row, 0), shape=(len(rows), 100), data=rows)
        for row, rows in tensors
    ]
    items = [(each, lambda data=each.data: data) for each in pieces]
    importing.save(folder, items, lambda total: lambda done: None)


class _Full(io.FileIO):
    """A file on a disk that is full after 5 kB."""

    def write(self, content: Any) -> int:
        if self.tell() + len(content) > 5_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(content)


def test_a_disk_that_fills_up_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's writer reports an unexpected position instead."""

    @contextmanager
    def full(self: Any, path: Path, mode: str) -> Iterator[Any]:
        with io.BufferedWriter(_Full(path, mode)) as file:
            yield file

    monkeypatch.setattr(FileSystem, "create_stream", full)
    with pytest.raises(RunError, match=r"No space left on device; make room, or name a folder"):
        save(tmp_path, *((row, torch.zeros(1, 100)) for row in range(8)))
    assert not (tmp_path / ".metadata").exists()


def test_regions_are_read_across_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions may differ from the written ones; regions never written are refused."""
    monkeypatch.setattr(importing, "_PART_BYTES", 1000)
    whole = torch.randn(8, 100)
    save(tmp_path, (0, whole[:3].clone()), (3, whole[3:6].clone()))
    assert len(list(tmp_path.glob("*.distcp"))) == 2
    read = Checkpoint(tmp_path).read

    def piece(first: int, last: int) -> Any:
        return SimpleNamespace(key="x", offset=(first, 5), shape=(last - first, 90), stacked=0, place="x")

    assert torch.equal(read(piece(1, 6), torch.float32), whole[1:6, 5:95])
    assert torch.equal(read(piece(2, 3), torch.bfloat16), whole[2:3, 5:95].bfloat16())
    with pytest.raises(RunError, match="has 180 of 270 elements of x; use a checkpoint that is whole"):
        read(piece(4, 7), torch.float32)
