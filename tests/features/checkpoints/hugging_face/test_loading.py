"""Files that lack tensors of a model are refused by what fills it, also where no arguments were checked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from mindspeed_dsa import log
from mindspeed_dsa.features.checkpoints.hugging_face import loading
from mindspeed_dsa.features.checkpoints.hugging_face.names import Shape
from mindspeed_dsa.runs.files import RunError

JOB = SimpleNamespace(
    num_layers=3,
    num_experts=2,
    moe_layer_freq=[0, 1, 1],
    q_lora_rank=8,
    moe_shared_expert_intermediate_size=16,
    experimental_attention_variant="dsa",
)


def write(folder: Path, *without: str) -> None:
    """Write a model's files, but tensors whose names have one of these in them."""
    names = [name for place in Shape.of(JOB).places() for name in place.theirs(JOB.num_layers)]
    kept = [name for name in names if not any(part in name for part in without)]
    save_file({name: torch.zeros(1) for name in kept}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("layers.1.self_attn.o_proj", "the files lack model.layers.1.self_attn.o_proj.weight"),
        ("layers.2.self_attn.indexer.", "the files lack the indexers of layers 3"),
        ("layers.2.self_attn.indexer.wk.", "the files lack the indexers of layers 3"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, part: str, said: str) -> None:
    write(tmp_path, part)
    with pytest.raises(RunError, match=said):
        loading.load([], tmp_path, JOB, log.get())


def test_a_dense_models_files_have_no_indexers(tmp_path: Path) -> None:
    write(tmp_path, ".indexer.")
    loading.load([], tmp_path, JOB, log.get())
