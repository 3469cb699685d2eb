"""Small models of transformers with random weights, and their inputs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def in_release(name: str) -> bool:
    """Return whether the installed transformers has the model of a name in :data:`KINDS`."""
    try:
        files = distribution("transformers")
    except PackageNotFoundError:
        return True
    return Path(str(files.locate_file(f"transformers/models/{name.partition(' ')[0]}"))).is_dir()


_KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v32": {},
    "deepseek_v32 yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
    },
    "glm_moe_dsa": {},
    "glm_moe_dsa sharing": {"index_topk_pattern": "FSF"},
    "glm_moe_dsa serving": {"index_topk_pattern": "FSSF", "num_hidden_layers": 4},
    "axk2": {"n_group": None, "topk_group": None, "kv_lora_rank": 12},
    "hy_v4": {"indexer_types": ["full", "full", "full"]},
    "hy_v4 sharing": {"indexer_types": ["full", "shared", "full"]},
    "hy_v4 serving": {"indexer_types": ["full", "shared", "shared", "full"], "num_hidden_layers": 4},
    "hy_v4_vl": {
        "indexer_types": ["full", "shared", "full"],
        # A share of the 4 pairs of rotated dimensions for times, heights and widths.
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
    },
    "mistral_large4": {"no_rope_layers": [1, 0, 1]},
    "mistral_large4 sharing": {
        "no_rope_layers": [1, 0, 1, 0],
        "index_topk_pattern": "FSFS",
        "kv_source_layers": [0, 1, 0, 1],
        "num_hidden_layers": 4,
    },
    "dots3_note": {
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
        "sliding_window": 7,
        "head_dim": 16,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 20,
        "swa_kv_lora_rank": 24,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 8,
        "shared_experts_intermediate_size": 16,
    },
}
KINDS = {name: values for name, values in _KINDS.items() if in_release(name)}
"""Configurations by name, which begins with the ``model_type``; where layers share, some have no indexer."""
FAMILIES = [name for name in KINDS if name in (
    "deepseek_v32", "glm_moe_dsa sharing", "axk2", "hy_v4 sharing", "hy_v4_vl", "mistral_large4 sharing",
    "dots3_note",
)]  # fmt: skip
"""One configuration of each family."""
CLASSES = {
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32ForCausalLM"),
    "glm_moe_dsa": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM"),
    "axk2": ("AXK2Config", "AXK2ForCausalLM"),
    "hy_v4": ("HYV4Config", "HYV4ForCausalLM"),
    "hy_v4_vl": ("HYV4VLTextConfig", "HYV4VLForConditionalGeneration"),
    "mistral_large4": ("MistralLarge4TextConfig", "MistralLarge4ForConditionalGeneration"),
    "dots3_note": ("Dots3NoteTextConfig", "Dots3NoteForCausalLM"),
}
"""Names of the configuration of the text model and of the model, by ``model_type``."""
VOCABULARY, TOPK, LAYERS = 97, 6, 3


def build(name: str, **others: Any) -> Any:
    """Build a model with weights large enough for attention to be far from uniform; in training mode."""
    import transformers

    # Of equal index scores ``torch.topk`` takes any; with this many heads no score is exactly 0.
    values: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 2,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 128,
        "index_n_heads": 32,
        "index_head_dim": 16,
        "index_topk": TOPK,
        "pad_token_id": None,
        "attn_implementation": "eager",
    }
    of_config, of_model = CLASSES[name.partition(" ")[0]]
    config = getattr(transformers, of_config)(**values | KINDS[name] | others)
    if of_model.endswith("ConditionalGeneration"):
        config = with_images(config)
    torch.manual_seed(0)
    model = getattr(transformers, of_model)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Otherwise sinks, scales and residual streams would not differ.
            if parameter.dim() > 1 or not name.endswith(("norm.weight", "norm.bias")):
                parameter.normal_(std=0.3)
    return model


def with_images(text: Any) -> Any:
    """Return a configuration with a small vision tower before the text model."""
    import transformers

    vision: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": 4,
    }
    if text.model_type == "hy_v4_vl_text":
        vision |= {"out_hidden_size": text.hidden_size, "max_image_size": 8}
        of_config, others = "HYV4VLConfig", {"image_token_id": VOCABULARY - 1, "video_token_id": VOCABULARY}
    else:
        vision |= {"model_type": "pixtral", "image_size": 8}
        of_config, others = "MistralLarge4Config", {"image_token_index": VOCABULARY - 1}
    return getattr(transformers, of_config)(
        text_config=text,
        vision_config=vision,
        attn_implementation=text._attn_implementation,
        experts_implementation=text._experts_implementation,
        **others,
    )


def layers_of(model: Any) -> Any:
    """Return the decoder layers of the text model."""
    return getattr(model.model, "language_model", model.model).layers


def without_fp32(patch: Any) -> None:
    """Make transformers' casts to fp32, of index scores and of the softmax, casts to fp64 and none."""
    patch.setattr(torch.Tensor, "float", torch.Tensor.double)
    patch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: torch.softmax(x, dim))


def tokens(batch: int = 2, rows: int = 40) -> Tensor:
    """Return ``[batch, rows]`` token ids, the same in every call."""
    return torch.randint(VOCABULARY, (batch, rows), generator=torch.Generator().manual_seed(1))


def packed() -> dict[str, Tensor]:
    """Return documents of 13, 20 and 7 tokens in one row, separated by their positions."""
    return {
        "input_ids": tokens(1),
        "position_ids": torch.cat([torch.arange(n) for n in (13, 20, 7)])[None],
    }


def padded(side: str) -> dict[str, Tensor]:
    """Return two sequences, the first one with 9 tokens of padding."""
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, slice(9) if side == "left" else slice(31, None)] = 0
    return {"input_ids": tokens(), "attention_mask": mask}


INPUTS = {
    "causal": {"input_ids": tokens()},
    "left padding": padded("left"),
    "right padding": padded("right"),
    "packed": packed(),
    "few keys": {"input_ids": tokens(2, TOPK)},
}


def close(ours: Tensor, theirs: Tensor, bound: float = 1e-5) -> bool:
    """Return whether two tensors differ by less than a share of the largest value."""
    return bool((ours - theirs).abs().max() <= bound * theirs.abs().max())
