"""Megatron loads imported checkpoints in every layout; its saves are exported to the same files."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.matrix.hugging_face import DEEPSEEK, DENSE, GLM, Model
from tests.tools.weights.models import FILE, done

pytest.importorskip("transformers", "5.20", reason="needs transformers >= 5.20: pip install '.[test]'")

HERE = "tests.tools.weights.layouts"
MODELS = {DENSE: Model(DENSE, 4), DEEPSEEK: Model(DEEPSEEK, 4), GLM: Model(GLM, 8, 2, 1)}
SPARSE = {"experimental_attention_variant": "dsa"}
LATENT = {
    "experimental_attention_variant": None,
    "multi_latent_attention": True,
    "transformer_impl": "local",
}
LAYOUTS = {
    "TP2": {"tp": 2},
    "PP2": {"pp": 2},
    "TP2, EP2": {"tp": 2, "ep": 2, "etp": 1},
    "one process": {},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from a kind to a folder with the model's files and checkpoints."""

    @cache
    def folder_of(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        MODELS[kind].theirs().save_pretrained(folder / "model")
        job = ["--make-vocab-size-divisible-by", 1]
        done("import", folder / "model", folder / "checkpoints", "--dtype", "float32", "--", *job)
        return folder

    return folder_of


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_checkpoint_is_loaded_and_one_that_is_saved_exported(
    pool: Any, made: Any, tmp_path: Path, layout: str, kind: str
) -> None:
    folder, sizes = made(kind), LAYOUTS[layout]
    ranks = sizes.get("tp", 1) * sizes.get("pp", 1)
    job = {
        "model": MODELS[kind],
        "switches": LATENT if kind == DENSE else SPARSE,
        "files": str(folder / "model"),
        **sizes,
    }
    checkpoint = str(folder / "checkpoints" / "release")
    for count, names in pool.run(f"{HERE}:differing", ranks, checkpoint=checkpoint, **job):
        assert count > 30
        assert names == []
    pool.run(f"{HERE}:save", ranks, checkpoint=str(tmp_path / "saved"), **job)
    done("export", tmp_path / "saved", tmp_path / "out", "--dtype", "float32", "--like", folder / "model")
    assert (tmp_path / "out" / FILE).read_bytes() == (folder / "model" / FILE).read_bytes()
