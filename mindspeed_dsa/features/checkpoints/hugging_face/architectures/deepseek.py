"""Tables of DeepSeek-V3 (also for Kimi-K2 and Moonlight), and of DeepSeek-V3.2 and GLM-5 with an indexer."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_dsa.features.checkpoints.hugging_face.architectures.table import (
    NORMS,
    PREDICTIONS,
    SHAPES,
    SIZES,
    Architecture,
    Parts,
    Tensors,
    mlp,
    mlp_shapes,
)

_INDEXER: Parts = {
    f"self_attention.core_attention.indexer.{ours}": (f"self_attn.indexer.{theirs}",)
    for ours, theirs in {
        "linear_wq_b.weight": "wq_b.weight",
        "linear_wk.weight": "wk.weight",
        "k_norm.weight": "k_norm.weight",
        "k_norm.bias": "k_norm.bias",
        "linear_weights_proj.weight": "weights_proj.weight",
    }.items()
}
_TENSORS = Tensors(
    attention={
        "input_layernorm.weight": NORMS["input_layernorm.weight"],
        "self_attention.linear_kv_down_proj.weight": ("self_attn.kv_a_proj_with_mqa.weight",),
        "self_attention.kv_layernorm.weight": ("self_attn.kv_a_layernorm.weight",),
        "self_attention.linear_kv_up_proj.weight": ("self_attn.kv_b_proj.weight",),
        "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
        "pre_mlp_layernorm.weight": NORMS["pre_mlp_layernorm.weight"],
    },
    query={"self_attention.linear_q_proj.weight": ("self_attn.q_proj.weight",)},
    latent_query={
        "self_attention.linear_q_down_proj.weight": ("self_attn.q_a_proj.weight",),
        "self_attention.q_layernorm.weight": ("self_attn.q_a_layernorm.weight",),
        "self_attention.linear_q_up_proj.weight": ("self_attn.q_b_proj.weight",),
    },
    indexer=_INDEXER,
    dense=mlp("mlp", "mlp"),
    routed={
        "mlp.router.weight": ("mlp.gate.weight",),
        "mlp.router.expert_bias": ("mlp.gate.e_score_correction_bias",),
    },
    shared=mlp("mlp.shared_experts", "mlp.shared_experts"),
    experts=mlp("mlp.experts.experts", "mlp.experts.{expert}"),
    prediction={
        "enorm.weight": ("enorm.weight",),
        "hnorm.weight": ("hnorm.weight",),
        "eh_proj.weight": ("eh_proj.weight",),
        "final_layernorm.weight": ("shared_head.norm.weight",),
    },
    repeated={
        "embed_tokens.weight": "model.embed_tokens.weight",
        "shared_head.head.weight": "lm_head.weight",
    },
)
_QUERIES = "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)"
_SHAPES = {
    **SHAPES,
    "mlp.gate.weight": ("n_routed_experts", "hidden_size"),
    "mlp.gate.e_score_correction_bias": ("n_routed_experts",),
    "self_attn.q_proj.weight": (_QUERIES, "hidden_size"),
    "self_attn.q_a_proj.weight": ("q_lora_rank", "hidden_size"),
    "self_attn.q_a_layernorm.weight": ("q_lora_rank",),
    "self_attn.q_b_proj.weight": (_QUERIES, "q_lora_rank"),
    "self_attn.kv_a_proj_with_mqa.weight": ("kv_lora_rank + qk_rope_head_dim", "hidden_size"),
    "self_attn.kv_a_layernorm.weight": ("kv_lora_rank",),
    "self_attn.kv_b_proj.weight": ("num_attention_heads * (qk_nope_head_dim + v_head_dim)", "kv_lora_rank"),
    "self_attn.o_proj.weight": ("hidden_size", "num_attention_heads * v_head_dim"),
    "self_attn.indexer.wq_b.weight": ("index_n_heads * index_head_dim", "q_lora_rank"),
    "self_attn.indexer.wk.weight": ("index_head_dim", "hidden_size"),
    "self_attn.indexer.weights_proj.weight": ("index_n_heads", "hidden_size"),
    **mlp_shapes("mlp.shared_experts", "n_shared_experts * moe_intermediate_size"),
    **mlp_shapes("mlp.experts.{expert}", "moe_intermediate_size"),
}
DEEPSEEK_V3 = Architecture(
    types=("deepseek_v3", "kimi_k2"),
    class_name="DeepseekV3ForCausalLM",
    tensors=_TENSORS,
    sizes={
        **SIZES,
        "q_lora_rank": "q_lora_rank",
        "kv_lora_rank": "kv_lora_rank",
        "qk_head_dim": "qk_nope_head_dim",
        "qk_pos_emb_head_dim": "qk_rope_head_dim",
        "v_head_dim": "v_head_dim",
        "num_experts": "n_routed_experts",
        "moe_ffn_hidden_size": "moe_intermediate_size",
        "moe_router_topk": "num_experts_per_tok",
    },
    # Some loaders take head_dim for qk_rope_head_dim.
    sums={"qk_head_dim": ("qk_nope_head_dim", "qk_rope_head_dim"), "head_dim": ("qk_rope_head_dim",)},
    nullable=("q_lora_rank",),
    counts=("first_k_dense_replace", "n_shared_experts", PREDICTIONS),
    defaults={
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
    },
    only={
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "hidden_act": ("silu", "swish"),
        "rope_interleave": (True,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "moe_layer_freq": (1,),
    },
    ropes=("default", "yarn"),
    arguments={
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_dtype": "fp32",
    },
    marks={"experimental_attention_variant": False},
    indexer="deepseek-v3.2",
    shapes=_SHAPES,
    never_fp8=("embed_tokens", "head", "mlp.gate", "eh_proj", "indexer.weights_proj"),
    mindspeed_llm="deepseek3",
)
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    types=("deepseek_v32",),
    class_name="DeepseekV32ForCausalLM",
    defaults={**DEEPSEEK_V3.defaults, "max_position_embeddings": 163840},
    lists=("mlp_layer_types",),
    marks={
        **DEEPSEEK_V3.marks,
        "experimental_attention_variant": True,
        "dsa_indexer_rope_interleaved": False,
    },
    mindspeed_llm="deepseek32",
)
GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    types=("glm_moe_dsa",),
    class_name="GlmMoeDsaForCausalLM",
    defaults={
        **DEEPSEEK_V3.defaults,
        "n_group": 1,
        "topk_group": 1,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
    },
    lists=("mlp_layer_types", "indexer_types"),
    marks={"experimental_attention_variant": True, "dsa_indexer_rope_interleaved": True},
    indexer="glm-5",
    mindspeed_llm="glm5",
)
