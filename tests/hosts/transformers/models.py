"""Small models of transformers with random weights, and their inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

KINDS = {
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
}
"""Configurations by name, which begins with the ``model_type``; where layers share, some have no indexer."""
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
        "attn_implementation": "eager",
    }
    kind = name.partition(" ")[0]
    prefix = {"deepseek_v32": "DeepseekV32", "glm_moe_dsa": "GlmMoeDsa"}[kind]
    config = getattr(transformers, f"{prefix}Config")(**values | KINDS[name] | others)
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model


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
