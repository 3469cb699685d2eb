"""A DeepSeek-V3 of some ten thousand weights for TorchTitan 0.2, as a flavor of its own model."""

from __future__ import annotations

from torchtitan.models.deepseek_v3 import DeepSeekV3ModelArgs, deepseekv3_args
from torchtitan.models.moe import MoEArgs


def add() -> None:
    """Add flavors ``tiny``, ``tiny_flex`` with another attention, and ``tiny_dense`` without experts."""
    for name, attention, dense in (("tiny", "sdpa", 1), ("tiny_flex", "flex", 1), ("tiny_dense", "sdpa", 4)):
        deepseekv3_args[name] = DeepSeekV3ModelArgs(
            vocab_size=512,
            dim=64,
            inter_dim=96,
            moe_inter_dim=32,
            n_layers=4,
            n_dense_layers=dense,
            n_heads=4,
            q_lora_rank=48,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=16,
            v_head_dim=16,
            mscale=0.7,
            attn_type=attention,
            moe_args=MoEArgs(num_experts=4, num_shared_experts=1, top_k=2, score_before_experts=False),
        )
