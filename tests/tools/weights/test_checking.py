"""``weights check`` finds damage of each kind, names tensor and file, and is silent about sound files."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mindspeed_dsa.__main__ import main
from tests.tools.weights import models
from tests.tools.weights.models import FILE, weights

pytest.importorskip("transformers", "5.20", reason="needs transformers >= 5.20: pip install '.[test]'")

PROJECTION = "model.layers.1.self_attn.o_proj.weight"
FACTORS = f"{PROJECTION}_scale_inv"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
PLAIN, NORM, ROUTER = "model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.gate.weight"
FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model in FP8 with a multi-token prediction layer, in two files."""
    folder = models.quantise(models.write("deepseek_v32", tmp_path_factory.mktemp("made"), predictions=1))
    tensors = load_file(folder / FILE)
    (folder / FILE).unlink()
    write(folder, tensors)
    return folder


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors to two files by turns, with their index."""
    parts = [dict(list(tensors.items())[part::2]) for part in (0, 1)]
    for file, part in zip(FILES, parts, strict=True):
        save_file(part, folder / file, {"format": "pt"})
    index = {name: file for file, part in zip(FILES, parts, strict=True) for name in part}
    (folder / f"{FILE}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


@pytest.fixture
def model(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model"))


def changed(model: Path, change: Callable[[dict[str, Tensor]], None]) -> dict[str, str]:
    """Change tensors of a folder; return the file of each."""
    tensors = {name: tensor.clone() for name, tensor in sorted(models.tensors_of(model).items())}
    change(tensors)
    write(model, tensors)
    index: dict[str, str] = json.loads((model / f"{FILE}.index.json").read_text())["weight_map"]
    return index


def problems(model: Path) -> list[str]:
    """Return the problems that the command prints, which exits with 1."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):  # the bar
        status = main(["weights", "check", str(model)])
    text = out.getvalue()
    lines = [line for line in text.splitlines() if line.startswith(("-", "  -"))]
    assert status == 1, text
    assert re.search(rf"{model}: .*\b{text.count(chr(10) + '- ') + text.startswith('- ')} problems", text), (
        text
    )
    return lines


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind == "deepseek_v32" else pytest.mark.full) for kind in models.CLASSES],
)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_sound_files(tmp_path: Path, kind: str, fp8: bool) -> None:
    folder = models.write(kind, tmp_path / "model", predictions=1)
    if fp8:
        models.quantise(folder)
    status, text = weights("check", folder)
    assert status == 0, text
    tensors = models.tensors_of(folder)
    read = [name for name in tensors if not name.endswith("_scale_inv")]
    assert f"in {len(read)} weights, no problems" in text
    assert "note" not in text


def test_layers_that_transformers_does_not_save_are_no_problem(tmp_path: Path) -> None:
    folder = models.write("deepseek_v3", tmp_path / "model", predictions=1)
    tensors = models.tensors_of(folder)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.4.")}
    save_file(kept, folder / FILE, {"format": "pt"})
    status, text = weights("check", folder)
    assert status == 0, text
    assert "note: config.json speaks of 1 more layers of multi-token prediction" in text


def test_every_number_that_is_not_finite_is_counted(model: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[ROUTER][[0, 1, 3], [0, 3, 159]] = torch.tensor([torch.nan, torch.inf, -torch.inf]).bfloat16()
        tensors[PROJECTION].view(torch.uint8)[5, :9] = 0xFF
        tensors["model.layers.4.enorm.weight"][1] = torch.nan

    files = changed(model, change)
    before = models.tensors_of(model)
    for name in (ROUTER, PROJECTION):
        assert not before[name].float().isfinite().all()
    assert sorted(problems(model)) == [
        f"- {name} in {files[name]}: {count} of {before[name].numel()} numbers are NaN or infinite"
        for name, count in ((ROUTER, 3), (PROJECTION, 9), ("model.layers.4.enorm.weight", 1))
    ]


def _nan_factor(tensors: dict[str, Tensor]) -> tuple[str, str]:
    tensors[FACTORS][1, 0] = torch.nan
    return FACTORS, "holds nan at [1, 0] in {file}, which is no factor"


def _zero_factor(tensors: dict[str, Tensor]) -> tuple[str, str]:
    tensors[FACTORS][0, 0] = 0
    return FACTORS, "holds 0.0 at [0, 0] in {file}, which is no factor"


def _fewer_factors(tensors: dict[str, Tensor]) -> tuple[str, str]:
    tensors[FACTORS] = tensors[FACTORS][:1].clone()
    return FACTORS, "is [1, 1] in torch.float32; blocks of 128 x 128 need [2, 1]"


def _no_factors(tensors: dict[str, Tensor]) -> tuple[str, str]:
    del tensors[FACTORS]
    return PROJECTION, "is in FP8, and"


def _missing(tensors: dict[str, Tensor]) -> tuple[str, str]:
    del tensors[NORM]
    return NORM, "the files lack"


def _unknown(tensors: dict[str, Tensor]) -> tuple[str, str]:
    tensors["model.layers.0.mlp.sinks"] = torch.ones(3)
    return "model.layers.0.mlp.sinks", "in {file}, which the model of config.json does not"


def _no_indexer(tensors: dict[str, Tensor]) -> tuple[str, str]:
    for name in [name for name in tensors if name.startswith("model.layers.2.self_attn.indexer")]:
        del tensors[name]
    return "layers 3", "the files lack the indexers of"


def _shape(tensors: dict[str, Tensor]) -> tuple[str, str]:
    tensors[NORM] = torch.ones(7).bfloat16()
    return NORM, "is [7], and in config.json hidden_size is 160 ({file})"


def _rows(tensors: dict[str, Tensor]) -> tuple[str, str]:
    tensors[PLAIN] = tensors[PLAIN][:290].clone()
    return PLAIN, "is [290, 160], and in config.json vocab_size is 300 ({file})"


def _copy(tensors: dict[str, Tensor]) -> tuple[str, str]:
    tensors["model.layers.4.embed_tokens.weight"][3, 3] += 1
    return "model.layers.4.embed_tokens.weight", "differs from model.embed_tokens.weight"


def _packed(tensors: dict[str, Tensor]) -> tuple[str, str]:
    tensors[EXPERT.replace("weight", "weight_packed")] = torch.zeros(48, 20, dtype=torch.int32)
    return EXPERT.replace("weight", "weight_packed"), "int4 or int8, packed in int32 (compressed-tensors)"


KINDS = [
    *(_nan_factor, _zero_factor, _fewer_factors, _no_factors, _missing, _unknown, _no_indexer),
    *(_shape, _rows, _copy, _packed),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__.strip("_").replace("_", " "))
def test_damage_of_each_kind(model: Path, kind: Callable[[dict[str, Tensor]], tuple[str, str]]) -> None:
    said: list[str] = []
    files = changed(model, lambda tensors: said.extend(kind(tensors)))
    file = files.get(said[0].split(" ")[0], "")
    found = "\n".join(problems(model))
    for words in said:
        assert words.format(file=file) in found


@pytest.mark.full
def test_all_problems_are_listed(model: Path) -> None:
    """Those of structure, of factors and of numbers, in one run."""
    damages = (_nan_factor, _missing, _unknown, _no_indexer, _copy)

    def change(tensors: dict[str, Tensor]) -> None:
        for damage in damages:
            damage(tensors)
        tensors[EXPERT.replace("up", "down")].view(torch.uint8)[0, 0] = 0x7F

    changed(model, change)
    assert len(problems(model)) == len(damages) + 1


def test_a_configuration_of_another_model(model: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {"q_lora_rank": 128}
    (model / "config.json").write_text(json.dumps(config))
    found = problems(model)
    for layer in range(5):
        name = f"model.layers.{layer}.self_attn.q_a_proj.weight is [136, 160]"
        assert any(name in line and "q_lora_rank is 128 (model-0000" in line for line in found)


def test_a_file_that_is_cut(model: Path) -> None:
    os.truncate(model / FILES[1], (model / FILES[1]).stat().st_size - 100)
    assert any(FILES[1] in line and "not fully covered" in line for line in problems(model))


@pytest.mark.parametrize("config", [None, {"model_type": "llama4"}])
def test_what_cannot_be_checked_is_refused(model: Path, config: dict[str, str] | None) -> None:
    (model / "config.json").unlink()
    if config is not None:
        (model / "config.json").write_text(json.dumps(config))
    status, text = weights("check", model)
    assert status == 2
    assert "config.json" in text
    status, text = weights("check", model, "--", "--num-layers", 3)
    assert status == 2
    assert "weights check: it takes no flags of a job" in text
