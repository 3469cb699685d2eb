"""Export with a pattern: files without the indexers that are gone, and a configuration that says so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.weights import models
from tests.tools.weights.models import done, same, tensors_of, weights
from tests.tools.weights.test_round_trip import loaded

pytest.importorskip("transformers", "5.20", reason="needs transformers >= 5.20: pip install '.[test]'")

PATTERN = "--dsa-indexer-topk-pattern"
FULL: dict[str, dict[str, Any]] = {"glm_moe_dsa": {"index_topk_freq": 1}, "deepseek_v32": {}}


def checkpoint_of(kind: str, folder: Path, predictions: int = 0, **sizes: Any) -> Path:
    """Write a model with all indexers, and import it; return the folder of its files."""
    theirs = models.write(kind, folder / "model", torch.float32, predictions, **{**FULL[kind], **sizes})
    done("import", theirs, folder / "checkpoints", "--dtype", "float32")
    return theirs


@pytest.mark.parametrize("kind", ["glm_moe_dsa", pytest.param("deepseek_v32", marks=pytest.mark.full)])
@pytest.mark.parametrize("like", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("predictions", [pytest.param(0, marks=pytest.mark.full), 1])
def test_indexers_of_sharing_layers_are_left_out(tmp_path, kind, like, predictions):
    theirs = checkpoint_of(kind, tmp_path, predictions)
    flags = ["--like", theirs] if like else []
    said = done("export", tmp_path / "checkpoints", tmp_path / "out", PATTERN, "CSSC", *flags)
    assert "layers 2, 3 are written without an indexer" in said
    gone = ("model.layers.1.self_attn.indexer.", "model.layers.2.self_attn.indexer.")
    expected = tensors_of(theirs)
    kept = {name: tensor for name, tensor in expected.items() if not name.startswith(gone)}
    # wq_b, wk, k_norm's weight and bias, weights_proj
    assert len(kept) == len(expected) - 2 * 5
    out = tensors_of(tmp_path / "out")
    if not like:
        kept, out = ({name: t.bfloat16() for name, t in tensors.items()} for tensors in (kept, out))
    assert same(out, kept)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["index_topk_pattern"] == "FSSF"
    assert config["use_index_cache"] is True
    assert "index_topk_freq" not in config
    if kind == "glm_moe_dsa":
        assert config["indexer_types"] == ["full", "shared", "shared", "full"]
        if not predictions:  # transformers has no layers of multi-token prediction
            loaded(kind, tmp_path / "out")  # strictly: no weight is missing or unknown


def test_the_files_are_imported_again_with_the_pattern(tmp_path):
    checkpoint_of("glm_moe_dsa", tmp_path)
    done("export", tmp_path / "checkpoints", tmp_path / "out", PATTERN, "CCSC", "--dtype", "float32")
    done("import", tmp_path / "out", tmp_path / "again", "--dtype", "float32")
    done("export", tmp_path / "again", tmp_path / "same", "--dtype", "float32")
    assert same(tensors_of(tmp_path / "same"), tensors_of(tmp_path / "out"))


@pytest.mark.full
def test_a_pattern_of_all_layers_changes_nothing(tmp_path):
    checkpoint_of("glm_moe_dsa", tmp_path)
    said = done("export", tmp_path / "checkpoints", tmp_path / "out", PATTERN, "CCCC", "--dtype", "float32")
    assert "without an indexer" not in said
    done("export", tmp_path / "checkpoints", tmp_path / "plain", "--dtype", "float32")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        pytest.param("CSC", "has 3 letters, and the model 4 layers", marks=pytest.mark.full),
        ("SCCC", "layer 1 shares"),
        ("CXCC", "X is no kind of layer"),
        pytest.param(
            "CCCC",
            "layers 2, 4 of .* have no indexer, so they cannot compute; write S for them",
            marks=pytest.mark.full,
        ),
    ],
    ids=["length", "first", "letter", "lost"],
)
def test_patterns_that_a_checkpoint_does_not_have(tmp_path, pattern, words):
    checkpoint_of("glm_moe_dsa", tmp_path, index_topk_freq=2)
    status, said = weights("export", tmp_path / "checkpoints", tmp_path / "out", PATTERN, pattern)
    assert status == 2
    assert re.search(words, said)
    assert not (tmp_path / "out").exists()
