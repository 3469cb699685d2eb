"""Indexes of torch's checkpoints run nothing that a pickle may name."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from mindspeed_dsa.features.checkpoints.hugging_face.torch_dist_files import INDEX, Checkpoint
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
