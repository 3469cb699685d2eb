"""Indexes of torch checkpoints are unpickled without running code that a pickle names."""

from __future__ import annotations

import dataclasses
import pickle
import sys
import types
import unittest.mock
from pathlib import Path

import pytest
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

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


def index_of(folder: Path, place: object) -> None:
    key = MetadataIndex("weight", (0, 0), 0)
    (folder / INDEX).write_bytes(pickle.dumps(Metadata({}, storage_data={key: place})))


@pytest.mark.parametrize("name", ["{outside}", "../outside", "folder/file", "a\0b"])
def test_an_index_names_files_of_its_own_folder(tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(bytes(64))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    index_of(folder, _StorageInfo(name.format(outside=outside), 0, 16))
    with pytest.raises(RunError, match="is no file of this folder"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    "place", [5, None, _StorageInfo(5, 0, 1)], ids=["number", "nothing", "number as name"]
)
def test_an_index_with_other_contents_is_damaged(tmp_path: Path, place: object) -> None:
    index_of(tmp_path, place)
    with pytest.raises(RunError, match=r"\.metadata cannot be read"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "index", [Metadata({}), Metadata(None, storage_data={})], ids=["no places", "no tensors"]
)
def test_an_index_that_lacks_a_part_is_damaged(tmp_path: Path, index: Metadata) -> None:
    (tmp_path / INDEX).write_bytes(pickle.dumps(index))
    with pytest.raises(RunError, match=r"\.metadata cannot be read"):
        Checkpoint(tmp_path)


def test_an_index_holds_subclasses_of_megatron_0_15_and_before(tmp_path: Path) -> None:
    # Both classes as Megatron-core 0.15 defines them, under the names that it pickles.
    @dataclasses.dataclass
    class MCoreMetadata(Metadata):
        mcore_data: dict[str, object] | None = None

    @dataclasses.dataclass(frozen=True)
    class MCoreSavePlan(SavePlan):
        mcore_data: dict[str, object] | None = None

    strategies = types.ModuleType("megatron.core.dist_checkpointing.strategies.torch")
    for made in (MCoreMetadata, MCoreSavePlan):
        made.__module__, made.__qualname__ = strategies.__name__, made.__name__
        setattr(strategies, made.__name__, made)
    place = _StorageInfo("__0_0.distcp", 0, 16)
    index = MCoreMetadata({}, storage_data={MetadataIndex("weight"): place}, mcore_data={"weight": {}})
    index.all_local_plans = [MCoreSavePlan([], mcore_data={"weight": {}})]
    with unittest.mock.patch.dict(sys.modules, {strategies.__name__: strategies}):
        (tmp_path / INDEX).write_bytes(pickle.dumps(index))
    (tmp_path / "__0_0.distcp").write_bytes(bytes(16))
    read = Checkpoint(tmp_path).read_metadata()
    assert type(read) is Metadata
    assert read.storage_data == index.storage_data
