"""Tables of Qwen2 (biases of query, key, value) and Qwen3 (norms of query, key), dense and with experts."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_dsa.features.checkpoints.hugging_face.architectures.llama import (
    ATTENTION,
    COMPUTED,
    DEFAULTS,
    DENSE,
    EXPERT_SIZES,
    EXPERTS,
    GROUPED_SHAPES,
    GROUPED_SIZES,
    ROPES,
)
from mindspeed_dsa.features.checkpoints.hugging_face.architectures.table import (
    Architecture,
    Parts,
    Tensors,
    mlp,
    mlp_shapes,
)

_BIASES: Parts = {
    "self_attention.linear_qkv.bias": (
        "self_attn.q_proj.bias",
        "self_attn.k_proj.bias",
        "self_attn.v_proj.bias",
    )
}
_HEAD_NORMS: Parts = {
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
}
_ROUTED: Parts = {"mlp.router.weight": ("mlp.gate.weight",)}
_EXPERTS = mlp("mlp.experts.experts", "mlp.experts.{expert}")
_SHAPES = {
    **GROUPED_SHAPES,
    "mlp.gate.weight": ("num_experts", "hidden_size"),
    **mlp_shapes("mlp.experts.{expert}", "moe_intermediate_size"),
    **mlp_shapes("mlp.shared_expert", "shared_expert_intermediate_size"),
}
QWEN2 = Architecture(
    types=("qwen2",),
    class_name="Qwen2ForCausalLM",
    tensors=Tensors({**ATTENTION, **_BIASES}, dense=mlp("mlp", "mlp")),
    sizes=GROUPED_SIZES,
    nullable=COMPUTED,
    defaults={**DEFAULTS, "num_key_value_heads": 32},
    only={"hidden_act": ("silu", "swish"), "use_sliding_window": (False,)},
    ropes=ROPES,
    arguments={**DENSE, "add_qkv_bias": True},
    shapes=_SHAPES,
    mindspeed_llm="qwen25",
)
QWEN3 = replace(
    QWEN2,
    types=("qwen3",),
    class_name="Qwen3ForCausalLM",
    tensors=Tensors({**ATTENTION, **_HEAD_NORMS}, dense=mlp("mlp", "mlp")),
    defaults={**DEFAULTS, "num_key_value_heads": 32, "head_dim": 128},
    only={**QWEN2.only, "attention_bias": (False,)},
    arguments={**DENSE, "qk_layernorm": True},
    mindspeed_llm="qwen3",
)
QWEN2_MOE = replace(
    QWEN2,
    types=("qwen2_moe",),
    class_name="Qwen2MoeForCausalLM",
    tensors=replace(
        QWEN2.tensors,
        routed=_ROUTED,
        shared={
            **mlp("mlp.shared_experts", "mlp.shared_expert"),
            "mlp.shared_experts.gate_weight": ("mlp.shared_expert_gate.weight",),
        },
        experts=_EXPERTS,
    ),
    sizes={
        **GROUPED_SIZES,
        **EXPERT_SIZES,
        "num_experts": "num_experts",
        "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
    },
    counts=("decoder_sparse_step",),
    defaults={**DEFAULTS, "num_key_value_heads": 16, "norm_topk_prob": False},
    only={**QWEN2.only, "qkv_bias": (True,)},
    arguments={**EXPERTS, "add_qkv_bias": True, "moe_shared_expert_gate": True},
    mindspeed_llm="qwen2-moe",
)
QWEN3_MOE = replace(
    QWEN3,
    types=("qwen3_moe",),
    class_name="Qwen3MoeForCausalLM",
    tensors=replace(QWEN3.tensors, routed=_ROUTED, experts=_EXPERTS),
    sizes={**GROUPED_SIZES, **EXPERT_SIZES, "num_experts": "num_experts"},
    counts=("decoder_sparse_step",),
    aliases={"num_experts": "num_local_experts"},
    defaults={**DEFAULTS, "num_key_value_heads": 4, "norm_topk_prob": False},
    arguments={**EXPERTS, "qk_layernorm": True},
    mindspeed_llm="qwen3-moe",
)
