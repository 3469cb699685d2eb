"""Small models in Hugging Face's files, and the command that reads and writes them."""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mindspeed_dsa.__main__ import main
from mindspeed_dsa.features.checkpoints.hugging_face import fp8

CLASSES = {"deepseek_v3": "DeepseekV3", "deepseek_v32": "DeepseekV32", "glm_moe_dsa": "GlmMoeDsa"}
FILE = "model.safetensors"
_FP8 = ("_proj.weight", "kv_a_proj_with_mqa.weight", "indexer.wq_b.weight", "indexer.wk.weight")
_NOT_FP8 = ("weights_proj", "eh_proj")


def write(
    kind: str, folder: Path, dtype: torch.dtype = torch.bfloat16, predictions: int = 0, **sizes: Any
) -> Path:
    """Write a model with random weights, as transformers does.

    Args:
        kind: ``model_type``; GLM's shares selections.
        folder: folder of the files, which is created.
        dtype: dtype of the weights; biases of routers are in fp32, as in released files.
        predictions: number of layers of multi-token prediction, with released files' names; transformers has
            none.
        sizes: sizes that replace the small defaults.
    """
    import transformers

    values: dict[str, Any] = {
        "vocab_size": 300, "hidden_size": 160, "intermediate_size": 200, "moe_intermediate_size": 48,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16,
        "q_lora_rank": 136, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "first_k_dense_replace": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "num_nextn_predict_layers": predictions,
    }  # fmt: skip
    if kind != "deepseek_v3":
        values |= {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 6}
    if kind == "glm_moe_dsa":
        values |= {"index_topk_freq": 2, "index_skip_topk_offset": 1}
    config = getattr(transformers, f"{CLASSES[kind]}Config")(**{**values, **sizes})
    model = getattr(transformers, f"{CLASSES[kind]}ForCausalLM")(config).to(dtype)
    model.save_pretrained(folder)
    tensors = {name: _noise(name, tensor, dtype) for name, tensor in load_file(folder / FILE).items()}
    for layer in range(predictions):
        tensors |= _prediction(tensors, config.num_hidden_layers + layer)
    save_file(tensors, folder / FILE, {"format": "pt"})
    (folder / "tokenizer.json").write_text("{}\n", encoding="utf-8")
    return folder


def _noise(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    noise = torch.randn(tensor.shape) * 0.05 + float("norm" in name)
    return noise.to(torch.float32 if name.endswith("correction_bias") else dtype)


def _prediction(tensors: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """Return a layer of multi-token prediction like the layer with most tensors: experts and an indexer."""
    counts = Counter(name.split(".")[2] for name in tensors if name.startswith("model.layers."))
    below = f"model.layers.{counts.most_common(1)[0][0]}."
    copied = {
        name.replace(below, f"model.layers.{number}."): torch.randn_like(tensor.float()).to(tensor.dtype)
        for name, tensor in tensors.items()
        if name.startswith(below)
    }
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    width = embedding.shape[1]
    added = {
        "enorm.weight": torch.randn(width).to(head.dtype),
        "hnorm.weight": torch.randn(width).to(head.dtype),
        "eh_proj.weight": torch.randn(width, 2 * width).to(head.dtype),
        "shared_head.norm.weight": torch.randn(width).to(head.dtype),
        "embed_tokens.weight": embedding.clone(),
        "shared_head.head.weight": head.clone(),
    }
    return {**copied, **{f"model.layers.{number}.{name}": tensor for name, tensor in added.items()}}


def quantise(folder: Path, powers: torch.dtype | None = None) -> Path:
    """Rewrite a model's linear weights like DeepSeek's files: in FP8, with a factor per 128 x 128 block.

    Factors are larger than the largest magnitude of a block requires, so that recomputed factors would show.

    Args:
        folder: model's folder.
        powers: dtype of factors that are powers of two; in fp32 ``o_proj`` has other factors, as in V3.1.
    """
    tensors = load_file(folder / FILE)
    for name, tensor in list(tensors.items()):
        if name.endswith(_FP8) and not any(part in name for part in _NOT_FP8):
            exact = powers is None or (powers == torch.float32 and "o_proj" in name)
            _, factors = fp8.quantise(tensor, powers_of_two=not exact)
            factors = factors * ((1 + 0.3 * torch.rand(factors.shape)) if exact else 2)
            tensors[name], factors = fp8.quantise(tensor, factors)
            tensors[f"{name}_scale_inv"] = factors.to(powers or torch.float32)
    save_file(tensors, folder / FILE, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]
    }  # fmt: skip
    if powers is not None:
        config["quantization_config"]["scale_fmt"] = "ue8m0"
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder's files with the safetensors library."""
    return {
        name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()
    }


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether names, types and bytes are equal."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and torch.equal(one[name].contiguous().view(torch.uint8), other[name].contiguous().view(torch.uint8))
        for name in one
    )


def weights(*words: object) -> tuple[int, str]:
    """Run ``python -m mindspeed_dsa weights`` in this process; return its exit status and output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = main(["weights", *map(str, words)])
    return status, out.getvalue()


def done(*words: object) -> str:
    """Run the command, which must succeed; return its output."""
    status, text = weights(*words)
    assert status == 0, text
    return text
