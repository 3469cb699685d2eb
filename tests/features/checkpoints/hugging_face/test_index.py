"""Files of torch's checkpoints: indexes run nothing that a pickle may name, and a full disk is named."""

from __future__ import annotations

import errno
import io
import os
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mindspeed_dsa.features.checkpoints.hugging_face.torch_dist_files import INDEX, Item, Reader, write_part
from mindspeed_dsa.runs import files
from mindspeed_dsa.runs.files import RunError


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("pathlib", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "FileSystemWriter"),
    ],
)
def test_an_index_names_nothing_but_its_own_classes(tmp_path: Path, module: str, name: str) -> None:
    marker = tmp_path / "ran"

    def text(value: str) -> bytes:
        return pickle.BINUNICODE + len(value).to_bytes(4, "little") + value.encode()

    call = text(module) + text(name) + pickle.STACK_GLOBAL + text(f"touch {marker}") + pickle.TUPLE1
    (tmp_path / INDEX).write_bytes(pickle.PROTO + b"\x04" + call + pickle.REDUCE + pickle.STOP)
    with pytest.raises(RunError, match=f"{name} does not belong into an index"):
        Reader(tmp_path)
    assert not marker.exists()


class _Full(io.FileIO):
    """A file on a disk that is full after 20 kB."""

    def write(self, content: Any) -> int:
        if self.tell() + len(content) > 20_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(content)


def test_a_disk_that_fills_up_is_named(tmp_path: Path) -> None:
    """Torch's writer speaks of an unexpected position instead."""
    item = Item("x", lambda: torch.zeros(100, 100), (100, 100), (0, 0), (100, 100))

    def full(path: Path, mode: str) -> Any:
        return io.BufferedWriter(_Full(path, mode))

    with (
        mock.patch.object(files, "open", full, create=True),
        pytest.raises(RunError, match=r"__0_0\.distcp cannot be written .*No space left.*make room"),
    ):
        write_part(tmp_path, "__0_0.distcp", [item], lambda done: None)
    assert [path.name for path in tmp_path.rglob("*")] == [".records"]
