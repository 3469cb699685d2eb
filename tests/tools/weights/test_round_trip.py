"""Imported and exported files have the same bytes: three kinds, three dtypes, layers of prediction."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_dsa.runs.files import amount
from mindspeed_dsa.tools.planner import configs
from mindspeed_dsa.tools.weights import job
from tests.tools.weights import models
from tests.tools.weights.models import CLASSES, FILE, done, same, tensors_of

pytest.importorskip("transformers", "5.20", reason="needs transformers >= 5.20: pip install '.[test]'")

QUICK = "glm_moe_dsa"
KINDS = [kind if kind == QUICK else pytest.param(kind, marks=pytest.mark.full) for kind in CLASSES]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
@pytest.mark.parametrize("predictions", [pytest.param(0, marks=pytest.mark.full), 1])
def test_the_same_file_comes_out(tmp_path: Path, kind: str, dtype: str, predictions: int) -> None:
    theirs = models.write(kind, tmp_path / "model", DTYPES[dtype], predictions)
    done("import", theirs, tmp_path / "checkpoints", "--dtype", dtype)
    done("export", tmp_path / "checkpoints", tmp_path / "out", "--dtype", dtype, "--like", theirs)
    assert (tmp_path / "out" / FILE).read_bytes() == (theirs / FILE).read_bytes()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (theirs / "tokenizer.json").read_bytes()
    done("export", tmp_path / "checkpoints", tmp_path / "alone", "--dtype", dtype)
    assert same(tensors_of(tmp_path / "alone"), tensors_of(theirs))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("like", [True, pytest.param(False, marks=pytest.mark.full)])
def test_transformers_loads_what_is_exported(tmp_path: Path, kind: str, like: bool) -> None:
    """Strictly: no tensor is missing or unknown, in several files."""
    theirs = models.write(kind, tmp_path / "model", torch.float32)
    done("import", theirs, tmp_path / "checkpoints", "--dtype", "float32")
    like_flags = ["--like", theirs] if like else []
    done(
        "export", tmp_path / "checkpoints", tmp_path / "out",
        "--dtype", "float32", "--shard-size", "500K", *like_flags
    )  # fmt: skip
    index = json.loads((tmp_path / "out" / f"{FILE}.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    before, after = loaded(kind, theirs), loaded(kind, tmp_path / "out")
    assert same(before, after)


def loaded(kind: str, folder: Path) -> dict[str, Any]:
    """Return the weights of transformers' model; no weight may be missing or unknown."""
    import transformers

    family = getattr(transformers, f"{CLASSES[kind]}ForCausalLM")
    model, info = family.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return dict(model.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_fp8_files_have_the_same_bytes_and_factors(tmp_path: Path, kind: str) -> None:
    theirs = models.quantise(models.write(kind, tmp_path / "model", predictions=1))
    done("import", theirs, tmp_path / "checkpoints")
    done("export", tmp_path / "checkpoints", tmp_path / "out", "--fp8-blocks", "--like", theirs)
    assert (tmp_path / "out" / FILE).read_bytes() == (theirs / FILE).read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]

    # Without the model's factors: the largest magnitude of each block / 448.
    done("export", tmp_path / "checkpoints", tmp_path / "alone", "--fp8-blocks")
    done("export", tmp_path / "checkpoints", tmp_path / "plain")
    exported, plain = tensors_of(tmp_path / "alone"), tensors_of(tmp_path / "plain")
    assert exported.keys() == tensors_of(theirs).keys()
    factors = {name: factor for name, factor in exported.items() if name.endswith("_scale_inv")}
    assert factors
    for name, factor in factors.items():
        weight, values = name.removesuffix("_scale_inv"), plain[name.removesuffix("_scale_inv")].float()
        assert exported[weight].dtype == torch.float8_e4m3fn
        for row, bands in enumerate(values.split(128)):
            for column, block in enumerate(bands.split(128, 1)):
                assert factor[row, column] == block.abs().max() / 448
                back = exported[weight][128 * row :, 128 * column :][: len(block), : block.size(1)].float()
                # e4m3 has 3 mantissa bits, and 2**-10 is half of its smallest step.
                bound = block.abs() * 2.0**-4 + factor[row, column] * 2.0**-10
                assert ((back * factor[row, column] - block).abs() <= bound * 1.001).all()


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.full), torch.float8_e8m0fnu], ids=str
)
def test_factors_that_are_powers_of_two_stay_such(tmp_path: Path, dtype: torch.dtype) -> None:
    """They keep their bytes, and a block that has outgrown its factor gets the next power."""
    theirs = models.quantise(models.write("deepseek_v3", tmp_path / "model"), dtype)
    done("import", theirs, tmp_path / "checkpoints")
    done("export", tmp_path / "checkpoints", tmp_path / "out", "--fp8-blocks", "--like", theirs)
    assert (tmp_path / "out" / FILE).read_bytes() == (theirs / FILE).read_bytes()
    quantised = [
        json.loads((folder / "config.json").read_text())["quantization_config"]
        for folder in (tmp_path / "out", theirs)
    ]
    assert quantised[0] == quantised[1]

    tensors = load_file(theirs / FILE)
    factors = [name for name in tensors if name.endswith("_scale_inv") and "o_proj" not in name]
    for name in factors:
        tensors[name] = (tensors[name].float() / 16).to(dtype)
    save_file(tensors, theirs / FILE, {"format": "pt"})
    done("export", tmp_path / "checkpoints", tmp_path / "grown", "--fp8-blocks", "--like", theirs)
    grown, before = tensors_of(tmp_path / "grown"), tensors_of(tmp_path / "out")
    for name in factors:
        assert grown[name].dtype == dtype
        mantissas, _ = torch.frexp(grown[name].float())
        assert (mantissas == 0.5).all(), name
        # Twice the necessary factor is the original one; four times where the largest magnitude was 448.
        assert (before[name].float() / grown[name].float()).unique().tolist() in ([2], [4], [2, 4])


@pytest.mark.full
def test_a_model_that_transformers_wrote_has_no_layers_of_prediction(tmp_path: Path) -> None:
    """Its configuration may list such layers all the same; only the job's flags can require them."""
    theirs = models.write("deepseek_v3", tmp_path / "model")
    config = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    done("import", theirs, tmp_path / "checkpoints")
    done("export", tmp_path / "checkpoints", tmp_path / "out", "--like", theirs)
    assert (tmp_path / "out" / FILE).read_bytes() == (theirs / FILE).read_bytes()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    status, text = models.weights("import", theirs, tmp_path / "other", "--", "--mtp-num-layers", 1)
    assert status == 2
    assert "mtp_num_layers is 1 here and None in the files: omit --mtp-num-layers" in text
    # The printed flags are therefore loadable, and a plan is of the same model.
    lines = done("flags", theirs).splitlines()
    assert lines[0].startswith("# config.json speaks of 1 more layers of multi-token prediction")
    assert not any("mtp" in line for line in lines[1:])
    planned = SimpleNamespace(dsa_indexer_topk_pattern=None)
    configs.apply(theirs, planned, set())
    assert planned.mtp_num_layers is None
    (theirs / FILE).unlink()
    assert "--mtp-num-layers 1" in done("flags", theirs).splitlines()


def test_files_of_kimi_k2_are_of_deepseeks_architecture(tmp_path: Path) -> None:
    """Their buffers of frequencies carry no weights: they are neither read nor written."""
    theirs = models.write("deepseek_v3", tmp_path / "model")
    config, weights = json.loads((theirs / "config.json").read_text()), load_file(theirs / FILE)
    (theirs / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2"}))
    buffers = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(4)}
    save_file({**weights, **buffers}, theirs / FILE, {"format": "pt"})
    done("import", theirs, tmp_path / "checkpoints")
    done("export", tmp_path / "checkpoints", tmp_path / "out", "--like", theirs)
    assert same(tensors_of(tmp_path / "out"), weights)
    assert loaded("deepseek_v3", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "deepseek_v3"


@pytest.mark.full
def test_fp8_of_a_model_whose_files_have_none(tmp_path: Path) -> None:
    """The rule decides which weights are in FP8, and code is not copied."""
    theirs = models.write("deepseek_v3", tmp_path / "model")
    (theirs / "tokenizer_of_theirs.py").write_text("raise SystemExit\n", encoding="utf-8")
    done("import", theirs, tmp_path / "checkpoints")
    done("export", tmp_path / "checkpoints", tmp_path / "alone", "--fp8-blocks")
    done("export", tmp_path / "checkpoints", tmp_path / "like", "--fp8-blocks", "--like", theirs)
    alone, like = tensors_of(tmp_path / "alone"), tensors_of(tmp_path / "like")
    assert models.same(like, alone)
    assert like["model.layers.0.self_attn.o_proj.weight"].dtype == torch.float8_e4m3fn
    assert [path.name for path in (tmp_path / "like").glob("tokenizer*")] == ["tokenizer.json"]


def test_a_repeated_layer_of_multi_token_prediction_is_imported_once(tmp_path: Path) -> None:
    theirs = models.write("deepseek_v3", tmp_path / "model", predictions=1)
    flags = ["--mtp-num-layers", "3", "--mtp-use-repeated-layer"]
    wanted = job.import_of(theirs, tmp_path / "checkpoints", flags, None)
    assert wanted.values["mtp_num_layers"] == 1


def test_the_configuration_has_the_type_of_the_weights(tmp_path: Path) -> None:
    """``--like`` decides the type, unless ``--dtype`` does. A tracker may end with a newline."""
    theirs = models.write("deepseek_v3", tmp_path / "model", torch.float32)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("release\n")
    done("import", theirs, tmp_path / "checkpoints", "--dtype", "float32")
    done("export", tmp_path / "checkpoints", tmp_path / "out", "--like", theirs)
    assert tensors_of(tmp_path / "out")["model.norm.weight"].dtype == torch.float32
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    text = done(
        "export", tmp_path / "checkpoints", tmp_path / "half", "--like", theirs, "--dtype", "bfloat16"
    )
    half = tensors_of(tmp_path / "half")
    wide = {name for name, tensor in half.items() if tensor.dtype != torch.bfloat16}
    assert wide == {name for name in half if name.endswith("e_score_correction_bias")}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert f"{amount(sum(tensor.nbytes for tensor in half.values()))} in 1 files" in text
    assert "MB in 1 files" in text


def test_no_row_of_the_files_is_cut_by_a_smaller_tokenizer(tmp_path: Path) -> None:
    """A job saves its tokenizer's size, and padding from an import is zero."""
    theirs = models.write("deepseek_v3", tmp_path / "model", num_hidden_layers=1)
    done("import", theirs, tmp_path / "checkpoints")
    common = tmp_path / "checkpoints" / "release" / "common.pt"
    saved = torch.load(common, weights_only=False)
    assert saved["args"].padded_vocab_size == 384, "of 300 in the files"
    for tokens, note in ((256, True), (300, False), (None, False)):
        saved["args"].vocab_size = tokens
        torch.save(saved, common)
        out = tmp_path / f"out {tokens}"
        text = done("export", tmp_path / "checkpoints", out)
        rows = 384 if tokens is None else 300
        assert json.loads((out / "config.json").read_text())["vocab_size"] == rows
        found = tensors_of(out)
        assert [len(found[f"{name}.weight"]) for name in ("model.embed_tokens", "lm_head")] == [rows, rows]
        assert loaded("deepseek_v3", out)
        assert (
            "config.json has a vocab_size of 300: the job has a vocabulary of 256, and rows above it hold "
            "numbers, and are written" in text
        ) is note
    done("export", tmp_path / "checkpoints", tmp_path / "like", "--like", theirs)
    assert same(tensors_of(tmp_path / "like"), tensors_of(theirs))
    # Tokens that training has added to the model that it began with.
    short, sizes = tmp_path / "short", json.loads((theirs / "config.json").read_text())
    short.mkdir()
    (short / "config.json").write_text(json.dumps(sizes | {"vocab_size": 256}))
    cut = {
        name: each[:256].clone() if len(each) == 300 else each for name, each in tensors_of(theirs).items()
    }
    save_file(cut, short / "model.safetensors")
    text = done("export", tmp_path / "checkpoints", tmp_path / "more", "--like", short)
    assert same(tensors_of(tmp_path / "more"), tensors_of(theirs))
    assert json.loads((tmp_path / "more" / "config.json").read_text())["vocab_size"] == 300
    assert "config.json has a vocab_size of 300: the job has a vocabulary of 256" in text


def test_tokens_are_those_of_the_jobs_tokenizer(tmp_path: Path) -> None:
    theirs = models.write("glm_moe_dsa", tmp_path / "model", num_hidden_layers=1, eos_token_id=[7, 9])
    done("import", theirs, tmp_path / "checkpoints")
    text = done("export", tmp_path / "checkpoints", tmp_path / "alone")
    assert "note: config.json has no bos_token_id, eos_token_id, pad_token_id: no tokenizer is known" in text
    common = tmp_path / "checkpoints" / "release" / "common.pt"
    saved = torch.load(common, weights_only=False)
    saved["args"].tokenizer_model = str(theirs)
    torch.save(saved, common)
    assert "note" not in done("export", tmp_path / "checkpoints", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == [7, 9]


@pytest.mark.parametrize(
    "form",
    [pytest.param({"index_topk_freq": 2}, marks=pytest.mark.full), {"index_topk_pattern": "FFSF"}],
    ids=str,
)
def test_a_deepseek_v32_that_shares_comes_out_as_it_was(tmp_path: Path, form: dict[str, Any]) -> None:
    """transformers' class has no sharing; vLLM reads the pattern with a switch."""
    theirs = models.write("deepseek_v32", tmp_path / "model", **form)
    weights = load_file(theirs / FILE)
    shared = {name: each for name, each in weights.items() if ".layers.2." in name and "indexer" in name}
    assert shared
    left = {name: each for name, each in weights.items() if name not in shared}
    save_file(left, theirs / FILE, {"format": "pt"})
    done("import", theirs, tmp_path / "checkpoints")
    done("export", tmp_path / "checkpoints", tmp_path / "out")
    assert same(tensors_of(tmp_path / "out"), left)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["use_index_cache"], written["index_topk_pattern"]) == (True, "FFSF")


def test_arguments_lie_in_a_list_where_a_job_of_0_19_has_saved_them(tmp_path: Path) -> None:
    theirs = models.write("deepseek_v32", tmp_path / "model", num_hidden_layers=2)
    done("import", theirs, tmp_path / "checkpoints")
    common = tmp_path / "checkpoints" / "release" / "common.pt"
    torch.save([torch.load(common, weights_only=False)], common)
    done("export", tmp_path / "checkpoints", tmp_path / "out")
    assert same(tensors_of(tmp_path / "out"), tensors_of(theirs))


def test_flags_that_are_printed_are_those_of_the_model(tmp_path: Path) -> None:
    """YaRN's flags have other names than the fields of Megatron's configuration."""
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 2048,
    }
    yarn |= {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    theirs = models.write("deepseek_v32", tmp_path / "model", num_hidden_layers=2, rope_parameters=yarn)
    flags = [shlex.split(line) for line in done("flags", theirs).splitlines()]
    words = [word for line in flags for word in line]
    assert job.import_of(theirs, tmp_path / "checkpoints", words, None).values["beta_fast"] == 16.0
    words[words.index("--yarn-beta-fast") + 1] = "17"
    status, text = models.weights("import", theirs, tmp_path / "checkpoints", "--", *words)
    assert status == 2
    assert "beta_fast is 17 here and 16 in the files: give --yarn-beta-fast 16.0" in text
