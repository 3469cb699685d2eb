"""Tables of Llama and Mixtral: grouped-query attention without biases and without norms of query and key."""

from __future__ import annotations

from typing import Any

from mindspeed_dsa.features.checkpoints.hugging_face.architectures.table import (
    NORMS,
    SHAPES,
    SIZES,
    Architecture,
    Parts,
    Tensors,
    mlp,
)

ATTENTION: Parts = {
    **NORMS,
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{name}_proj.weight" for name in "qkv"),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
}
GROUPED_SIZES = {**SIZES, "num_query_groups": "num_key_value_heads", "kv_channels": "head_dim"}
EXPERT_SIZES = {"moe_ffn_hidden_size": "moe_intermediate_size", "moe_router_topk": "num_experts_per_tok"}
GROUPED_SHAPES = {
    **SHAPES,
    "self_attn.q_proj.weight": ("num_attention_heads * head_dim", "hidden_size"),
    **{f"self_attn.{name}_proj.weight": ("num_key_value_heads * head_dim", "hidden_size") for name in "kv"},
    "self_attn.o_proj.weight": ("hidden_size", "num_attention_heads * head_dim"),
}
COMPUTED = ("num_key_value_heads", "head_dim")
"""Sizes that may be null: as many heads of keys as of queries, and the hidden size divided by heads."""
DEFAULTS: dict[str, Any] = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "head_dim": None}
ROPES = ("default", "llama3")
DENSE: dict[str, Any] = {
    "multi_latent_attention": False,
    "group_query_attention": True,
    "qk_layernorm": False,
    "num_experts": None,
}
"""Megatron's arguments of grouped queries in a model without experts."""
EXPERTS: dict[str, Any] = {
    **{name: value for name, value in DENSE.items() if name != "num_experts"},
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_router_dtype": "fp32",
}
"""Megatron's arguments of grouped queries in a model with experts."""
LLAMA = Architecture(
    types=("llama",),
    class_name="LlamaForCausalLM",
    tensors=Tensors(ATTENTION, dense=mlp("mlp", "mlp")),
    sizes=GROUPED_SIZES,
    nullable=COMPUTED,
    defaults={**DEFAULTS, "max_position_embeddings": 2048, "num_key_value_heads": None},
    only={"hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,)},
    ropes=ROPES,
    arguments=DENSE,
    shapes=GROUPED_SHAPES,
    mindspeed_llm="llama2",
)
MIXTRAL = Architecture(
    types=("mixtral",),
    class_name="MixtralForCausalLM",
    tensors=Tensors(
        ATTENTION,
        routed={"mlp.router.weight": ("block_sparse_moe.gate.weight",)},
        experts=mlp("mlp.experts.experts", "block_sparse_moe.experts.{expert}", ("w1", "w3", "w2")),
    ),
    sizes={
        **GROUPED_SIZES,
        **EXPERT_SIZES,
        "moe_ffn_hidden_size": "intermediate_size",
        "num_experts": "num_local_experts",
    },
    nullable=COMPUTED,
    defaults={
        **DEFAULTS,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "rope_theta": 1e6,
    },
    only={"hidden_act": ("silu", "swish"), "norm_topk_prob": (True,)},
    ropes=ROPES,
    arguments=EXPERTS,
    shapes={
        **GROUPED_SHAPES,
        "block_sparse_moe.gate.weight": ("num_local_experts", "hidden_size"),
        "block_sparse_moe.experts.{expert}.w1.weight": ("intermediate_size", "hidden_size"),
    },
    mindspeed_llm="mixtral",
)
