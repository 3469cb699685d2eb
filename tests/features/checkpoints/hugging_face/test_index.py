"""Files of torch's checkpoints: indexes run nothing that a pickle may name, and a full disk is named."""

from __future__ import annotations

import errno
import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from mindspeed_dsa.features.checkpoints.agreement import together
from mindspeed_dsa.features.checkpoints.hugging_face.torch_dist_files import (
    INDEX,
    Checkpoint,
    Saving,
    write_item,
)
from mindspeed_dsa.runs.files import RunError


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("pathlib", "os.system"),
        ("torch", "load"),
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "FileSystemWriter"),
        ("torch.distributed.checkpoint.metadata", "dataclass"),
    ],
)
def test_an_index_names_nothing_but_its_own_classes(tmp_path: Path, module: str, name: str) -> None:
    marker = tmp_path / "ran"

    def text(value: str) -> bytes:
        return pickle.BINUNICODE + len(value).to_bytes(4, "little") + value.encode()

    call = text(module) + text(name) + pickle.STACK_GLOBAL + text(f"touch {marker}") + pickle.TUPLE1
    (tmp_path / INDEX).write_bytes(pickle.PROTO + b"\x04" + call + pickle.REDUCE + pickle.STOP)
    with pytest.raises(RunError, match=f"{name} does not belong into an index"):
        Checkpoint(tmp_path)
    assert not marker.exists()


class _Full(io.FileIO):
    """A file on a disk that is full after 5 kB."""

    def write(self, content: Any) -> int:
        if self.tell() + len(content) > 5_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(content)


def saving(folder: Path, *tensors: tuple[int, torch.Tensor]) -> Saving:
    """Plan the rows of a tensor ``x`` of 8 x 100 at their places."""
    pieces: Any = [
        SimpleNamespace(key="x", size=(8, 100), offset=(row, 0), shape=(len(rows), 100), data=rows)
        for row, rows in tensors
    ]
    return Saving(folder, [(write_item(each), lambda data=each.data: data) for each in pieces])


def test_a_disk_that_fills_up_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's writer speaks of an unexpected position instead."""

    @contextmanager
    def full(self: Any, path: Path, mode: str) -> Iterator[Any]:
        with io.BufferedWriter(_Full(path, mode)) as file:
            yield file

    planned = saving(tmp_path, *((row, torch.zeros(1, 100)) for row in range(8)))
    monkeypatch.setattr(FileSystem, "create_stream", full)
    (plan,) = planned.plans
    with pytest.raises(RunError, match=r"No space left on device; make room, or name a folder"):
        together(lambda: planned.write(plan), "mindspeed_dsa weights")


def test_regions_are_read_across_the_files_parts(tmp_path: Path) -> None:
    """Also of what was written in other regions, and not where one was never written."""
    whole = torch.randn(8, 100)
    planned = saving(tmp_path, (0, whole[:3].clone()), (3, whole[3:6].clone()))
    planned.end([planned.write(plan) for plan in planned.plans])
    read = Checkpoint(tmp_path).read

    def piece(first: int, last: int) -> Any:
        return SimpleNamespace(key="x", offset=(first, 5), shape=(last - first, 90), stacked=0, place="x")

    assert torch.equal(read(piece(1, 6), torch.float32), whole[1:6, 5:95])
    assert torch.equal(read(piece(2, 3), torch.bfloat16), whole[2:3, 5:95].bfloat16())
    with pytest.raises(RunError, match="has 180 of 270 elements of x; use a checkpoint that is whole"):
        read(piece(4, 7), torch.float32)
