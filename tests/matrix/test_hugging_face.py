"""Megatron models with this library compute the same as Hugging Face transformers."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mindspeed_dsa.megatron.selections import Sharing
from tests.matrix import hugging_face
from tests.matrix.hugging_face import DEEPSEEK, DENSE, GLM, Model, megatron_name
from tests.support import warm
from tests.support.model import put_together

pytest.importorskip("transformers", "5.20", reason="needs transformers >= 5.20: pip install '.[test]'")
pytestmark = pytest.mark.releases(">=0.12.1", quick=True)

STEP = "tests.matrix.hugging_face:step"
BOUND = 1e-4
"""Largest difference of logits, and of gradients relative to their tensor's largest entry."""
FORMS = {
    "absorbed": {"use_fused_dsa": True, "use_dsa_absorb": True},
    "by head": {"use_fused_dsa": True, "use_dsa_absorb": False},
    "Megatron's": {},
}
DENSE_ATTENTION = {
    "experimental_attention_variant": None,
    "multi_latent_attention": True,
    "transformer_impl": "local",
}
GLM_5_2 = Model(GLM, 8, frequency=4, offset=3)
"""The first layers of GLM-5.2; layers 1, 2, 3 and 7 select keys."""
SHARING = [
    *(Model(GLM, 8, 2, offset) for offset in range(4)),
    *(Model(GLM, 8, 4, offset) for offset in range(3)),
    GLM_5_2,
    Model(GLM, 6, pattern="FSFFSS"),
]
WITHOUT_SHARING = [Model(DEEPSEEK), Model(DEEPSEEK, yarn=True), Model(GLM)]
QUICK = (Model(DEEPSEEK), GLM_5_2)
LAYOUTS = {"TP2+SP": {"tp": 2}, "PP2": {"pp": 2}, "CP2": {"cp": 2}}

of_transformers = cache(hugging_face.of_transformers)


def cases() -> Iterator[Any]:
    """Yield every model in every form; the quick tests run a few of them."""
    for model in (*WITHOUT_SHARING, *SHARING):
        for form in FORMS:
            quick = "MATRIX_RECORD" in os.environ or (model in QUICK and form != "Megatron's")
            yield pytest.param(model, form, id=f"{model}, {form}", marks=() if quick else pytest.mark.full)


@pytest.mark.parametrize(("model", "form"), list(cases()))
def test_one_process(pool: Any, model: Model, form: str) -> None:
    assert_same(model, pool.run(STEP, 1, model=model, switches=FORMS[form]))


@pytest.mark.releases(">=0.12.1")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shared_selections_on_two_ranks(pool: Any, layout: str) -> None:
    """The second pipeline stage begins with a selecting layer."""
    model, switches = Model(GLM, 8, 2, 1), {**FORMS["absorbed"]}
    if layout == "CP2":
        switches["context_parallel_size"] = 2
    ranks = pool.run(STEP, 2, model=model, switches=switches, **LAYOUTS[layout])
    assert_same(model, ranks, layout == "CP2")


def assert_same(model: Model, ranks: list[dict[str, Any]], context_parallel: bool = False) -> None:
    """Compare logits, and gradients except the indexers', whose loss transformers lacks."""
    gradients = put_together(ranks[:1] if context_parallel else ranks)
    biases = {name for rank in ranks for name in rank["biases"]}
    theirs = of_transformers(model)
    assert gradients.keys() | biases == {megatron_name(place) for place in model.shape().places()}
    compared = [rank for rank in ranks if rank["logits"] is not None]
    for rank in compared:
        width = rank["logits"].size(-1)
        expected = theirs["logits"][:, rank["positions"], rank["first"] : rank["first"] + width]
        assert (rank["logits"] - expected).abs().max() <= BOUND
    indexer = {name for name in gradients if ".indexer." in name}
    assert compared
    assert gradients.keys() - indexer == theirs["gradients"].keys()
    for name, gradient in theirs["gradients"].items():
        assert (gradients[name] - gradient).abs().max() <= BOUND * gradient.abs().max(), name
    assert all(gradients[name].any() for name in indexer)


# -- weights loaded from transformers' files ---------------------------------------------------------

READ = {
    "one process": {},
    "TP2+SP": {"tp": 2},
    "PP2 x VPP2": {"pp": 2, "vpp": 2},
    "TP2+SP, EP2": {"tp": 2, "ep": 2, "etp": 1},
    "CP2": {"cp": 2},
    "TP2+SP, PP2": {"tp": 2, "pp": 2},
}
QUICK_READ = ("TP2+SP, EP2",)


@pytest.mark.releases(">=0.12.1")
@pytest.mark.parametrize("kind", [DENSE, DEEPSEEK, GLM])
@pytest.mark.parametrize(
    "layout", [name if name in QUICK_READ else pytest.param(name, marks=pytest.mark.full) for name in READ]
)
def test_every_rank_reads_what_it_holds(pool: Any, tmp_path: Path, kind: str, layout: str) -> None:
    """All weights of the model are NaN before loading."""
    model = Model(kind, 8, *((2, 1) if kind == GLM else ()))
    hugging_face.of_transformers(model, tmp_path)
    sizes = READ[layout]
    ranks = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1)  # experts share them
    switches: dict[str, Any] = {**(FORMS["absorbed"] if kind != DENSE else DENSE_ATTENTION)}
    if layout == "CP2":
        switches["context_parallel_size"] = 2
    results = pool.run(STEP, ranks, model=model, switches=switches, folder=str(tmp_path), **sizes)
    assert_same(model, results, layout == "CP2")


def test_biases_of_routers_are_not_rounded(pool: Any, tmp_path: Path) -> None:
    """Before 0.14, Megatron's half precision wrapper keeps them in bf16 until the first step."""
    model = Model(DEEPSEEK)
    hugging_face.of_transformers(model, tmp_path)
    (biases,) = pool.run("tests.matrix.hugging_face:biases_in_bf16", 1, model=model, folder=str(tmp_path))
    files = hugging_face.read_files(tmp_path)
    assert len(biases) == model.layers - 1
    for name, bias in biases.items():
        layer = name.split(".")[2]
        assert torch.equal(bias, files[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"])
        assert not torch.equal(bias, bias.bfloat16().float())


def test_all_ranks_refuse_numbers_that_are_not_finite(pool: Any, tmp_path: Path) -> None:
    """With TP2 only the second rank reads the last rows."""
    model, name = Model(DENSE), "model.layers.0.self_attn.q_b_proj.weight"
    hugging_face.of_transformers(model, tmp_path)
    tensors = hugging_face.read_files(tmp_path)
    tensors[name][-1, 3:5] = torch.nan
    (file,) = tmp_path.glob("*.safetensors")
    save_file(tensors, file, {"format": "pt"})
    function = "tests.matrix.hugging_face:refusal"
    sizes = {"switches": DENSE_ATTENTION, "folder": str(tmp_path), "tp": 2}
    for message in pool.run(function, 2, model=model, **sizes):
        assert f"have NaN or infinities: {name} (2 in {file.name}); fetch these files again" in message


@pytest.mark.parametrize("kind", [pytest.param(DENSE, marks=pytest.mark.full), GLM])
def test_an_import_is_exported_again(tmp_path: Path, kind: str) -> None:
    """The checkpoint itself names its model, wherever this release stores that."""
    hugging_face.of_transformers(Model(kind, 8, *((2, 1) if kind == GLM else ())), tmp_path / "files")
    steps = (("import", "files", "checkpoints"), ("export", "checkpoints", "again"))
    for command, source, target in steps:
        words = [command, str(tmp_path / source), str(tmp_path / target), "--dtype", "float32"]
        done = warm.run([sys.executable, "-m", "mindspeed_dsa", "weights", *words], timeout=200)
        assert done.returncode == 0, done.stderr[-2000:]
    expected, actual = (hugging_face.read_files(tmp_path / name) for name in ("files", "again"))
    assert expected.keys() == actual.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


# -- the rule for the layers that select ------------------------------------------------------------

RULES = list(itertools.product((1, 2, 3, 4, 5), range(8)))
LAYERS = range(1, 13)


def test_the_rule_is_that_of_hugging_face() -> None:
    """Layers count from 0 there. Offset 0 is passed as 1: the first layer cannot share."""
    from transformers import GlmMoeDsaConfig

    for frequency, offset in RULES:
        config = GlmMoeDsaConfig(
            num_hidden_layers=len(LAYERS), index_topk_freq=frequency, index_skip_topk_offset=max(offset, 1)
        )
        sharing = Sharing(frequency, offset)
        ours = ["full" if sharing.computes(layer) else "shared" for layer in LAYERS]
        assert config.indexer_types == ours, (frequency, offset)


@pytest.mark.releases(">=0.19", quick=True)
def test_the_rule_is_that_of_megatron() -> None:
    dsa = import_module("megatron.core.transformer.experimental_attention_variant.dsa")
    for frequency, offset in RULES:
        sharing = Sharing(frequency, offset)
        for layer in LAYERS:
            shares = dsa.is_dsa_skip_topk_layer(layer, offset, frequency)
            assert sharing.computes(layer) is not shares, (frequency, offset, layer)
            source = dsa.source_dsa_compute_layer(layer, offset, frequency)
            assert sharing.source(layer) == source, (frequency, offset, layer)
