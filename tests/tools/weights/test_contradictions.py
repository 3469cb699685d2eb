"""Files that contradict their ``config.json`` or themselves, fused experts, and parts that are left out."""

from __future__ import annotations

import json
import re
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_dsa.features.checkpoints.hugging_face import mismatch
from mindspeed_dsa.features.checkpoints.hugging_face.config import arguments_of, read_config
from mindspeed_dsa.tools.weights.model import release_here
from tests.tools.weights import models
from tests.tools.weights.models import CLASSES, FILE, done, same, tensors_of, weights

pytest.importorskip("transformers", "5.20", reason="needs transformers >= 5.20: pip install '.[test]'")


def changed(folder: Path, **keys: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))
    return folder


def rewritten(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / FILE, {"format": "pt"})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("made")
    return {
        kind: models.write(kind, folder / kind, predictions=1, num_hidden_layers=3)
        for kind in ("deepseek_v3", "glm_moe_dsa")
    }


@pytest.fixture
def model(made: dict[str, Path], tmp_path: Path) -> Any:
    return lambda kind="deepseek_v3": Path(shutil.copytree(made[kind], tmp_path / "model"))


# -- shapes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("sizes", [{}, {"q_lora_rank": None}], ids=str)
def test_shapes_by_keys_are_those_of_transformers(kind: str, sizes: Any, tmp_path: Path) -> None:
    """All sizes differ from each other, so that no key stands for another one."""
    from mindspeed_dsa.features.checkpoints.hugging_face import contradictions
    from mindspeed_dsa.features.checkpoints.hugging_face.files import weights_of

    if sizes and kind != "deepseek_v3":
        pytest.skip("indexers need the latent")
    distinct = {
        "vocab_size": 301, "hidden_size": 160, "intermediate_size": 200, "moe_intermediate_size": 48,
        "num_attention_heads": 4, "n_routed_experts": 6, "n_shared_experts": 3, "kv_lora_rank": 18,
        "q_lora_rank": 136, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
    }  # fmt: skip
    indexer = {} if kind == "deepseek_v3" else {"index_n_heads": 5, "index_head_dim": 16}
    files = weights_of(models.write(kind, tmp_path / "model", **{**distinct, **indexer, **sizes}))
    assert contradictions.first_contradiction(files) is None
    shapes = files.architecture.shapes
    used = {
        re.sub(r"(?<=experts\.)\d+", "{expert}", re.sub(r"^model\.layers\.\d+\.", "", name))
        for name in files.names
    }
    assert {name for name in used - shapes.keys() if not name.startswith("self_attn.indexer.k_norm")} == set()


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("hidden_size", 64, ("hidden_size is 64",)),
        ("kv_lora_rank", 24, ("kv_a_layernorm.weight is [16], and in config.json kv_lora_rank is 24",)),
        (
            "num_attention_heads",
            8,
            (
                "num_attention_heads * (qk_nope_head_dim + v_head_dim) make 128",
                "kv_b_proj.weight is [64, 16]",
            ),
        ),
        ("v_head_dim", 12, ("num_attention_heads * (qk_nope_head_dim + v_head_dim) make 80",)),
        ("vocab_size", 299, ("is [300, 160], and in config.json vocab_size is 299",)),
        (
            "n_routed_experts",
            8,
            ("e_score_correction_bias is [4], and in config.json n_routed_experts is 8",),
        ),
        ("moe_intermediate_size", 50, ("moe_intermediate_size is 50",)),
        ("n_shared_experts", 2, ("n_shared_experts * moe_intermediate_size make 96",)),
        (
            "num_hidden_layers",
            2,
            ("layers 3, counted from 0", "num_nextn_predict_layers in config.json would be 2"),
        ),
    ],
)
def test_the_key_that_contradicts_the_files_is_named(
    model: Any, tmp_path: Path, key: str, value: int, says: Any
) -> None:
    folder = changed(model(), **{key: value, "num_key_value_heads": 8 if key == "num_attention_heads" else 4})
    status, text = weights("import", folder, tmp_path / "target")
    assert status == 2
    for each in says:
        assert each in text, text
    assert text.count(" is [") <= 1, "the first one only"
    assert not (tmp_path / "target").exists()


def test_a_job_hears_of_it_before_it_starts(model: Any) -> None:
    folder = changed(model(), kv_lora_rank=24)
    args = Namespace(**arguments_of(read_config(folder, "test"), "test"))
    (problem,) = mismatch.problems(args, folder, release_here())
    assert "kv_a_layernorm.weight is [16], and in config.json kv_lora_rank is 24" in problem


# -- layers of multi-token prediction ------------------------------------------------------------


def test_layers_that_the_config_does_not_mention_are_one_sentence(model: Any, tmp_path: Path) -> None:
    folder = changed(model(), num_nextn_predict_layers=0)
    status, text = weights("import", folder, tmp_path / "target")
    assert status == 2
    assert "the files have layers 3, counted from 0, and the model has 3 layers and 0 of multi-token" in text
    assert "prediction: num_nextn_predict_layers in config.json would be 1" in text
    assert "model.layers.3." not in text
    done("import", changed(folder, num_nextn_predict_layers=1), tmp_path / "target")


@pytest.mark.parametrize(
    "name", ["embed_tokens.weight", pytest.param("shared_head.head.weight", marks=pytest.mark.full)]
)
def test_a_copy_that_differs_is_refused(model: Any, tmp_path: Path, name: str) -> None:
    """Megatron has one tensor for both, so this one would be lost."""
    folder = model()
    tensors = load_file(folder / FILE)
    own = tensors[f"model.layers.3.{name}"]
    tensors[f"model.layers.3.{name}"] = own.clone()
    tensors[f"model.layers.3.{name}"][-1, -1] += 1
    rewritten(folder, tensors)
    status, text = weights("import", folder, tmp_path / "target")
    assert status == 2
    assert f"model.layers.3.{name} differs from " in text
    assert "leave the layer out with a smaller --mtp-num-layers" in text
    assert not (tmp_path / "target").exists()
    done("import", folder, tmp_path / "target", "--", "--mtp-num-layers", 0)
    tensors[f"model.layers.3.{name}"] = own.float()  # the same numbers in a wider type are the same
    rewritten(folder, tensors)
    done("import", folder, tmp_path / "again")


def test_a_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    folder = models.write("deepseek_v3", tmp_path / "model", num_hidden_layers=1)
    changed(folder, tie_word_embeddings=True)
    status, text = weights("import", folder, tmp_path / "target")
    assert status == 2
    assert (
        "lm_head.weight differs from model.embed_tokens.weight, and config.json has tie_word_embeddings"
        in text
    )


# -- indexers of layers that share ---------------------------------------------------------------


@pytest.mark.parametrize("quantised", [pytest.param(False, marks=pytest.mark.full), True])
def test_indexers_of_layers_that_share_are_left_out_and_kept(tmp_path: Path, quantised: bool) -> None:
    """As GLM-5.1 has them, whose config gets a pattern for IndexCache."""
    theirs = models.write(
        "glm_moe_dsa", tmp_path / "model", num_hidden_layers=3, index_topk_freq=1, predictions=1
    )
    if quantised:
        models.quantise(theirs)
    config = json.loads((theirs / "config.json").read_text())
    del config["indexer_types"]
    config |= {"index_topk_pattern": "FSF", "use_index_cache": True}
    (theirs / "config.json").write_text(json.dumps(config))
    text = done("import", theirs, tmp_path / "checkpoints")
    assert "note: the files have indexers in layers 2, which share a selection: these are not read" in text
    fp8 = ["--fp8-blocks"] if quantised else []
    done("export", tmp_path / "checkpoints", tmp_path / "like", "--like", theirs, *fp8)
    assert (tmp_path / "like" / FILE).read_bytes() == (theirs / FILE).read_bytes()
    done("export", tmp_path / "checkpoints", tmp_path / "alone", *fp8)
    lost = tensors_of(theirs).keys() - tensors_of(tmp_path / "alone").keys()
    assert {name.split(".indexer.")[0] for name in lost} == {"model.layers.1.self_attn"}


# -- experts as transformers has them in memory --------------------------------------------------


@pytest.mark.parametrize("kind", [pytest.param("deepseek_v3", marks=pytest.mark.full), "glm_moe_dsa"])
def test_fused_experts_are_read(kind: str, tmp_path: Path) -> None:
    import transformers

    apart = models.write(kind, tmp_path / "apart", torch.float32, num_hidden_layers=3)
    family = getattr(transformers, f"{CLASSES[kind]}ForCausalLM")
    model = family.from_pretrained(apart, dtype=torch.float32)
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    names = load_file(tmp_path / "fused" / FILE)
    assert [*names["model.layers.1.mlp.experts.gate_up_proj"].shape] == [4, 96, 160]
    done("import", tmp_path / "fused", tmp_path / "checkpoints", "--dtype", "float32")
    done("export", tmp_path / "checkpoints", tmp_path / "out", "--dtype", "float32")
    assert same(tensors_of(tmp_path / "out"), tensors_of(apart))
    done("export", tmp_path / "checkpoints", tmp_path / "like", "--like", tmp_path / "fused")
    assert same(tensors_of(tmp_path / "like"), tensors_of(apart))


@pytest.mark.full
def test_fused_experts_in_fp8_are_read(tmp_path: Path) -> None:
    """As transformers keeps them in memory: a factor for each 128 x 128 of an expert."""
    width = {"num_hidden_layers": 2, "moe_intermediate_size": 128}
    apart = models.quantise(models.write("deepseek_v3", tmp_path / "apart", **width))
    tensors = load_file(apart / FILE)
    experts = "model.layers.1.mlp.experts"
    for end in ("", "_scale_inv"):
        parts = [
            [tensors.pop(f"{experts}.{expert}.{name}_proj.weight{end}") for expert in range(4)]
            for name in ("gate", "up", "down")
        ]
        gate_up = [torch.cat(pair) for pair in zip(parts[0], parts[1], strict=True)]
        tensors[f"{experts}.gate_up_proj{end}"] = torch.stack(gate_up)
        tensors[f"{experts}.down_proj{end}"] = torch.stack(parts[2])
    fused = Path(shutil.copytree(apart, tmp_path / "fused"))
    rewritten(fused, tensors)
    done("import", fused, tmp_path / "checkpoints")
    done("export", tmp_path / "checkpoints", tmp_path / "out", "--fp8-blocks", "--like", fused)
    assert (tmp_path / "out" / FILE).read_bytes() == (apart / FILE).read_bytes()
    tensors[f"{experts}.gate_up_proj_scale_inv"] = torch.ones(4, 3, 2)
    rewritten(fused, tensors)
    status, text = weights("import", fused, tmp_path / "target")
    assert status == 2
    assert f"{experts}.0.gate_proj.weight_scale_inv is [2, 2]" in text
