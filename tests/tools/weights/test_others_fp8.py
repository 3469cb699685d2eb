"""FP8 models of other tools, from their files to a checkpoint and back; numbers that are not finite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tools.weights import families, models
from tests.tools.weights.models import FILE, done, tensors_of, weights

pytest.importorskip("transformers", "5.20", reason="needs transformers >= 5.20: pip install '.[test]'")

FP8 = torch.float8_e4m3fn
LAYOUTS = ("compressed-tensors", "DeepSeek-V4", "Qwen", "per tensor")
SETTINGS: dict[str, dict[str, Any]] = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
    },
    "DeepSeek-V4": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    "Qwen": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "per tensor": {"quant_method": "fp8", "activation_scheme": "static"},
}


def stored(name: str, tensor: Tensor, layout: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return a weight's tensors in a layout, and its values by the layout's formula."""
    rows, columns = tensor.shape
    height, width = (-(-size // 128) * 128 for size in tensor.shape)
    padded = torch.zeros(height, width)
    padded[:rows, :columns] = tensor.float()
    if layout == "compressed-tensors":
        factors = (tensor.float().abs().amax(1, keepdim=True) / 448).bfloat16()
        scales, name_of_factors = factors.float().expand(rows, columns), f"{name}_scale"
    elif layout == "per tensor":
        factors = tensor.float().abs().max() / 448
        scales, name_of_factors = factors.expand(rows, columns), f"{name}_scale"
    else:
        factors = padded.view(height // 128, 128, width // 128, 128).abs().amax((1, 3)) / 448
        if layout == "DeepSeek-V4":
            factors = torch.exp2(factors.log2().ceil())
        else:
            factors = factors.bfloat16().float()
        scales = torch.kron(factors, torch.ones(128, 128))[:rows, :columns]
        factors = factors.to(torch.float8_e8m0fnu if layout == "DeepSeek-V4" else torch.bfloat16)
        name_of_factors = (
            name.replace(".weight", ".scale") if layout == "DeepSeek-V4" else f"{name}_scale_inv"
        )
    quantised = (tensor.float() / scales).clamp(-448, 448).to(FP8)
    tensors = {name: quantised, name_of_factors: factors}
    if layout == "per tensor":
        tensors[name.replace(".weight", ".input_scale")] = torch.ones(())
    return tensors, (quantised.float() * scales).bfloat16()


def model_in(layout: str, folder: Path) -> dict[str, Tensor]:
    """Write a model with linear weights in a layout; return its weights as numbers."""
    models.write("deepseek_v3", folder, num_hidden_layers=2)
    tensors, values = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(folder / FILE).items():
        if "_proj" in name and name.endswith(".weight"):
            parts, values[name] = stored(name, tensor, layout)
            tensors |= parts
        else:
            tensors[name] = values[name] = tensor
    # Factors of a cache of keys and values in FP8.
    cache = {"compressed-tensors": "k_scale", "per tensor": "kv_b_proj.output_scale"}
    if layout in cache:
        tensors[f"model.layers.1.self_attn.{cache[layout]}"] = torch.ones(1)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE, {"format": "pt"}
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": SETTINGS[layout]}))
    return values


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_has_the_numbers_of_the_files(tmp_path: Path, layout: str) -> None:
    values = model_in(layout, tmp_path / "model")
    done("import", tmp_path / "model", tmp_path / "checkpoints")
    done("export", tmp_path / "checkpoints", tmp_path / "out")
    assert models.same(tensors_of(tmp_path / "out"), values)

    # In FP8 they are written like DeepSeek's files, whatever the source model has.
    words = ("--fp8-blocks", "--like", tmp_path / "model")
    done("export", tmp_path / "checkpoints", tmp_path / "fp8", *words)
    again, before = tensors_of(tmp_path / "fp8"), tensors_of(tmp_path / "model")
    quantised = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert quantised["quant_method"] == "fp8"
    assert quantised["activation_scheme"] == "dynamic"
    assert quantised["weight_block_size"] == [128, 128]
    assert "config_groups" not in quantised
    assert not [name for name in again if name.endswith((".scale", "_scale"))]
    factors = [name for name in again if name.endswith("_scale_inv")]
    assert len(factors) == sum(tensor.dtype == FP8 for tensor in before.values()) > 0
    if layout == "Qwen":
        assert (tmp_path / "fp8" / FILE).read_bytes() == (tmp_path / "model" / FILE).read_bytes()
    for name in factors:
        weight = name.removesuffix("_scale_inv")
        dtypes = {"DeepSeek-V4": torch.float8_e8m0fnu, "Qwen": torch.bfloat16}
        assert again[name].dtype == dtypes.get(layout, torch.float32)
        rows, columns = again[weight].shape
        scales = torch.kron(again[name].float(), torch.ones(128, 128))[:rows, :columns]
        error = (again[weight].float() * scales - values[weight].float()).abs()
        # e4m3 has 3 mantissa bits, and 2**-10 is half of its smallest step.
        assert (error <= values[weight].float().abs() * 2.0**-4 * 1.01 + scales * 2.0**-10).all()


def quantised_by_transformers(folder: Path) -> tuple[set[str], set[str]]:
    """Return the names of linear modules that transformers quantises for a folder's files, and of others."""
    import transformers
    from transformers.integrations.finegrained_fp8 import FP8Linear
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    config = transformers.AutoConfig.from_pretrained(folder)
    settings = transformers.FineGrainedFP8Config(**config.quantization_config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        FineGrainedFP8HfQuantizer(settings, pre_quantized=True)._process_model_before_weight_loading(model)
    linear = {name: each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    in_fp8 = {name for name, each in linear.items() if isinstance(each, FP8Linear)}
    return in_fp8, linear.keys() - in_fp8


def in_fp8_files(folder: Path) -> set[str]:
    factors = (name for name in tensors_of(folder) if name.endswith(".weight_scale_inv"))
    return {name.removesuffix(".weight_scale_inv") for name in factors if ".experts." not in name}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("llama", "qwen3_moe", "deepseek_v32") else pytest.mark.full)
        for kind in (*families.MODELS, *models.CLASSES)
    ],
)
def test_transformers_expects_factors_where_the_files_have_them(tmp_path: Path, kind: str) -> None:
    (families if kind in families.MODELS else models).write(kind, tmp_path / "model")
    done("import", tmp_path / "model", tmp_path / "checkpoints")
    for folder, words in (("alone", ()), ("like", ("--like", tmp_path / "model"))):
        done("export", tmp_path / "checkpoints", tmp_path / folder, "--fp8-blocks", *words)
        in_fp8, others = quantised_by_transformers(tmp_path / folder)
        assert in_fp8 == in_fp8_files(tmp_path / folder) != set()
        assert "lm_head" in others
        described = json.loads((tmp_path / folder / "config.json").read_text())["quantization_config"]
        skipped = described.get("modules_to_not_convert", [])
        assert bool(skipped) == (kind in ("qwen2_moe", "qwen3_moe", "mixtral"))
        # Loaders that have the router as a linear layer need its name as well.
        routers = {
            name.removesuffix(".weight") for name in tensors_of(tmp_path / folder) if ".gate.w" in name
        }
        assert not skipped or routers < set(skipped)


@pytest.mark.parametrize(
    "theirs",
    [
        [],
        pytest.param(["lm_head", "model.layers.1.self_attn"], marks=pytest.mark.full),
        pytest.param(["lm_head"], marks=pytest.mark.full),
    ],
)
def test_weights_that_a_reference_model_has_not_in_fp8_are_named(tmp_path: Path, theirs: list[str]) -> None:
    layout = "Qwen" if theirs else "compressed-tensors"
    model_in(layout, tmp_path / "model")
    tensors, plain = load_file(tmp_path / "model" / FILE), "model.layers.1.self_attn."
    for name in [name for name in tensors if name.startswith(plain) and "_scale" not in name]:
        tensors[name] = tensors[name].bfloat16()
    kept = {name: each for name, each in tensors.items() if not (name.startswith(plain) and "_scale" in name)}
    save_file(kept, tmp_path / "model" / FILE, {"format": "pt"})
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    if theirs:
        config["quantization_config"]["modules_to_not_convert"] = theirs
    file.write_text(json.dumps(config))
    done("import", tmp_path / "model", tmp_path / "checkpoints")
    words = ("--fp8-blocks", "--like", tmp_path / "model")
    done("export", tmp_path / "checkpoints", tmp_path / "out", *words)
    assert tensors_of(tmp_path / "out").keys().isdisjoint({f"{plain}o_proj.weight_scale_inv"})
    in_fp8, others = quantised_by_transformers(tmp_path / "out")
    assert in_fp8 == in_fp8_files(tmp_path / "out")
    assert {"lm_head", f"{plain}o_proj"} <= others
    skipped = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert skipped["modules_to_not_convert"][: len(theirs)] == theirs
    assert (skipped["modules_to_not_convert"] == theirs) == (len(theirs) == 2)


def test_numbers_that_are_not_finite_are_not_imported(tmp_path: Path) -> None:
    model_in("compressed-tensors", tmp_path / "model")
    tensors = load_file(tmp_path / "model" / FILE)
    damaged = {name: tensor.clone() for name, tensor in tensors.items()}
    projection = "model.layers.0.self_attn.o_proj.weight"
    damaged[projection].view(torch.uint8)[3, 4:6] = 0x7F
    damaged["model.norm.weight"][5] = torch.inf
    save_file(damaged, tmp_path / "model" / FILE, {"format": "pt"})
    status, text = weights("import", tmp_path / "model", tmp_path / "checkpoints")
    assert status == 2
    assert "have NaN or infinities: " in text
    assert f"{projection} (2 in {FILE})" in text
    assert f"model.norm.weight (1 in {FILE})" in text
    assert all(path.name.startswith(".") for path in (tmp_path / "checkpoints").iterdir())
    save_file(tensors, tmp_path / "model" / FILE, {"format": "pt"})
    done("import", tmp_path / "model", tmp_path / "checkpoints")
