"""Shards as the safetensors library and transformers write them; nothing half written has a final name."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from mindspeed_dsa.features.checkpoints.hugging_face.files import DTYPES, WeightFiles
from mindspeed_dsa.features.checkpoints.hugging_face.shard_files import (
    Shard,
    ShardFile,
    TensorSpec,
    divide,
    require_disk_space,
    write_index,
)
from mindspeed_dsa.runs.files import RunError


def specs(tensors: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def a_model() -> dict[str, torch.Tensor]:
    tensors = {f"of.{dtype}": torch.arange(48, dtype=torch.uint8).view(dtype) for dtype in DTYPES.values()}
    tensors["of.torch.bool"] = torch.ones(3, dtype=torch.bool)
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), 'é "\\\n': torch.randn(3, 5)}
    return tensors | {"layers.10.w": torch.randn(40, 30), "layers.9.w": torch.randn(40, 30).bfloat16()}


def test_bytes_are_those_of_the_library(tmp_path):
    """Whatever the order in which tensors come."""
    model = a_model()
    save_file(model, tmp_path / "theirs", metadata={"format": "pt"})
    (shard,) = divide(specs(model), 2**30)
    with ShardFile(tmp_path, shard) as file:
        for name in reversed(model):
            file.write(name, model[name])
        assert "model.safetensors" not in os.listdir(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "theirs"]
    assert shard.nbytes == (tmp_path / "theirs").stat().st_size


def test_strided_and_trained_tensors(tmp_path, monkeypatch):
    monkeypatch.setattr("mindspeed_dsa.features.checkpoints.hugging_face.shard_files._PIECE", 100)
    model = {
        "a": torch.randn(30, 20)[:, ::2],
        "b": torch.nn.Parameter(torch.randn(9, 7)).T,
        "c": torch.randn(3).sum(),
    }
    (shard,) = divide(specs(model), 2**30)
    with ShardFile(tmp_path, shard) as file:
        for name, tensor in model.items():
            file.write(name, tensor)
    read = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in model.items())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 100))
def test_tensors_are_dealt_out_as_by_transformers(sizes, shard_bytes):
    model = {f"t{n}": torch.zeros(size, dtype=torch.uint8) for n, size in enumerate(sizes)}
    theirs = split_torch_state_dict_into_shards(model, max_shard_size=shard_bytes)
    ours = divide(specs(model), shard_bytes)
    assert {shard.file: [each.name for each in shard.tensors] for shard in ours} == theirs.filename_to_tensors


def test_names_are_given_once():
    with pytest.raises(ValueError, match="one name: a"):
        divide([TensorSpec("a", torch.float32, (1,))] * 2, 4)


@pytest.mark.parametrize("shard_bytes", [2**30, 30_000])
def test_transformers_loads_the_folder(tmp_path, shard_bytes):
    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).bfloat16()
    config.save_pretrained(tmp_path)
    shards = divide(specs(model.state_dict()), shard_bytes)
    for shard in shards:
        with ShardFile(tmp_path, shard) as file:
            for tensor in shard.tensors:
                file.write(tensor.name, model.state_dict()[tensor.name])
    write_index(tmp_path, shards)
    assert (tmp_path / "model.safetensors.index.json").exists() == (len(shards) > 1)
    assert WeightFiles(tmp_path).names == model.state_dict().keys()
    loaded, report = LlamaForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(report.values()), report
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_the_index(tmp_path):
    shards = divide([TensorSpec("b", torch.float32, (2,)), TensorSpec("a", torch.bfloat16, (3,))], 8)
    write_index(tmp_path, shards)
    assert os.listdir(tmp_path) == ["model.safetensors.index.json"]
    names = {"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"}
    text = (tmp_path / "model.safetensors.index.json").read_text()
    assert json.loads(text) == {"metadata": {"total_size": 14}, "weight_map": names}


# -- what goes wrong ---------------------------------------------------------------------------

SHARD = Shard(
    "model.safetensors", (TensorSpec("a", torch.float32, (4, 3)), TensorSpec("b", torch.bfloat16, ()))
)


def fill(folder: Path, *tensors: tuple[str, torch.Tensor]) -> None:
    with ShardFile(folder, SHARD) as file:
        for name, tensor in tensors:
            file.write(name, tensor)


def test_an_exception_leaves_no_final_name(tmp_path):
    b = ("b", torch.tensor(1.0, dtype=torch.bfloat16))
    with pytest.raises(KeyError):
        fill(tmp_path, ("a", torch.zeros(4, 3)), b, ("unknown", torch.zeros(4, 3)))
    assert os.listdir(tmp_path) == []
    fill(tmp_path, ("a", torch.ones(4, 3)), b)
    assert os.listdir(tmp_path) == ["model.safetensors"]
    assert load_file(tmp_path / "model.safetensors")["a"].sum() == 12


def test_tensors_that_were_not_written(tmp_path):
    with pytest.raises(RunError, match="2 tensors were not written, the first is a"):
        fill(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("tensor", "found"),
    [
        (torch.zeros(3, 3), r"torch.float32 \[3, 3\]"),
        (torch.zeros(4, 2), r"torch.float32 \[4, 2\]"),
        (torch.zeros(4, 3).double(), r"torch.float64 \[4, 3\]"),
    ],
)
def test_a_tensor_that_was_not_announced(tmp_path, tensor, found):
    with pytest.raises(ValueError, match=rf"a is {found}, and torch.float32 \[4, 3\] was announced"):
        fill(tmp_path, ("a", tensor))


def test_two_writers_of_one_shard_do_not_write_into_each_other(tmp_path):
    """As two runs of one export: what the second begins leaves what the first has written as it is."""
    a, b = torch.randn(4, 3), torch.tensor(1.0, dtype=torch.bfloat16)
    with ShardFile(tmp_path, SHARD) as first:
        first.write("a", a)
        with pytest.raises(RunError, match="is not whole"), ShardFile(tmp_path, SHARD) as second:
            second.write("b", b)
        first.write("b", b)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], a)
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_file_that_exists_stays(tmp_path):
    (tmp_path / "model.safetensors").write_text("theirs")
    with pytest.raises(RunError, match="exists and stays as it is"), ShardFile(tmp_path, SHARD):
        pass
    assert (tmp_path / "model.safetensors").read_text() == "theirs"
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_full_disk(tmp_path, monkeypatch, call):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(RunError, match=r"model.safetensors cannot be written \(No space left on device\)"):
        fill(tmp_path, ("a", torch.zeros(4, 3)), ("b", torch.tensor(1.0, dtype=torch.bfloat16)))
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(RunError, match="cannot be written"), ShardFile(tmp_path / "gone", SHARD):
        pass


def test_disk_space(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or SimpleNamespace(free=12345))
    require_disk_space(tmp_path / "not" / "there", 12345)
    assert asked == [tmp_path]
    with pytest.raises(RunError, match=r"there needs 12,346 bytes, and its file system has 12,345 free"):
        require_disk_space(tmp_path / "not" / "there", 12346)
