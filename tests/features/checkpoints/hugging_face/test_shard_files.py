"""Shards are written as the safetensors library and transformers write them."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from mindspeed_dsa.features.checkpoints.agreement import together
from mindspeed_dsa.features.checkpoints.hugging_face.files import Reader
from mindspeed_dsa.features.checkpoints.hugging_face.shard_files import Writer, divide, write_index
from mindspeed_dsa.runs.files import RunError

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.float8_e4m3fn]


def announced(tensors: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.to("meta")) for name, tensor in tensors.items()]


def a_model() -> dict[str, torch.Tensor]:
    tensors = {f"of.{dtype}": torch.arange(48, dtype=torch.uint8).view(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), 'é "\\\n': torch.randn(3, 5)}
    return tensors | {"layers.10.w": torch.randn(40, 30), "layers.9.w": torch.randn(40, 30).bfloat16()}


def test_bytes_are_those_of_the_library(tmp_path):
    """The file's bytes equal the library's, whatever the order of writes."""
    model = a_model()
    save_file(model, tmp_path / "theirs", metadata={"format": "pt"})
    ((file, tensors),) = divide(announced(model), 2**30).items()
    assert file == "model.safetensors"
    with Writer(tmp_path / file, tensors) as writer:
        for name in reversed(model):
            writer.write(name, model[name])
    assert (tmp_path / file).read_bytes() == (tmp_path / "theirs").read_bytes()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 100))
def test_tensors_are_dealt_out_as_by_transformers(sizes, shard_bytes):
    model = {f"t{n}": torch.zeros(size, dtype=torch.uint8) for n, size in enumerate(sizes)}
    theirs = split_torch_state_dict_into_shards(model, max_shard_size=shard_bytes)
    ours = divide(announced(model), shard_bytes)
    assert {file: list(tensors) for file, tensors in ours.items()} == theirs.filename_to_tensors


@pytest.mark.parametrize("shard_bytes", [2**30, 30_000])
def test_transformers_loads_the_folder(tmp_path, shard_bytes):
    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).bfloat16()
    config.save_pretrained(tmp_path)
    shards = divide(announced(model.state_dict()), shard_bytes)
    for file, tensors in shards.items():
        with Writer(tmp_path / file, tensors) as writer:
            for name in tensors:
                writer.write(name, model.state_dict()[name])
    write_index(tmp_path, shards)
    assert (tmp_path / "model.safetensors.index.json").exists() == (len(shards) > 1)
    assert Reader(tmp_path).names == model.state_dict().keys()
    loaded, report = LlamaForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(report.values()), report
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_the_index(tmp_path):
    shards = divide(announced({"b": torch.zeros(2), "a": torch.zeros(3).bfloat16()}), 8)
    write_index(tmp_path, shards)
    assert os.listdir(tmp_path) == ["model.safetensors.index.json"]
    names = {"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"}
    text = (tmp_path / "model.safetensors.index.json").read_text()
    assert json.loads(text) == {"metadata": {"total_size": 14}, "weight_map": names}


# -- errors ------------------------------------------------------------------------------------

TENSORS = {"a": torch.zeros(4, 3), "b": torch.tensor(1.0, dtype=torch.bfloat16)}


def fill(path: Path, *tensors: tuple[str, torch.Tensor]) -> None:
    with Writer(path, dict(announced(TENSORS))) as writer:
        for name, tensor in tensors:
            writer.write(name, tensor)


def test_a_file_without_all_its_tensors_is_an_error(tmp_path):
    with pytest.raises(AssertionError, match="b"):
        fill(tmp_path / "x", ("a", torch.ones(4, 3)))
    fill(tmp_path / "y", *TENSORS.items())


@pytest.mark.parametrize(
    "tensor", [torch.zeros(3, 3), torch.zeros(4, 2), torch.zeros(4, 3).double()], ids=str
)
def test_a_tensor_that_was_not_announced(tmp_path, tensor):
    with pytest.raises(ValueError, match=r"a is torch.float\d\d \[\d, \d\], which was not announced"):
        fill(tmp_path / "x", ("a", tensor))


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_full_disk(tmp_path, monkeypatch, call):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(RunError, match="No space left on device; make room, or name a folder"):
        together(lambda: fill(tmp_path / "x", *TENSORS.items()), "mindspeed_dsa weights")
