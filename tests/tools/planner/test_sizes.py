"""Parameters of plans, compared with models that Megatron builds."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

import mindspeed_dsa
from mindspeed_dsa.tools.planner import arguments, flags, sizes

# -- run in the pool's workers --------------------------------------------------------------------


def parameters(command_lines: list[str]) -> list[int]:
    """Return the parameter counts of stock Megatron's models for command lines."""
    from megatron.core import parallel_state

    mindspeed_dsa.enable(experimental_attention_variant="dsa")
    parallel_state.initialize_model_parallel()
    return [_count(flags.read(line.split())[0]) for line in command_lines]


def _count(given: Any) -> int:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    latent: dict[str, Any] = {}
    if given.multi_latent_attention:
        names = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        names += ("experimental_attention_variant", "dsa_indexer_n_heads", "dsa_indexer_head_dim")
        latent = {name: getattr(given, name) for name in (*names, "dsa_indexer_topk", "transformer_impl")}
        latent |= {"multi_latent_attention": True, "rope_type": "rope", "apply_rope_fusion": False}
    config = (MLATransformerConfig if latent else TransformerConfig)(
        num_layers=given.num_layers,
        hidden_size=given.hidden_size,
        ffn_hidden_size=given.ffn_hidden_size,
        num_attention_heads=given.num_attention_heads,
        num_query_groups=given.num_query_groups if given.group_query_attention else None,
        normalization=given.normalization,
        add_bias_linear=given.add_bias_linear,
        add_qkv_bias=given.add_qkv_bias,
        qk_layernorm=given.qk_layernorm,
        gated_linear_unit=given.swiglu,
        activation_func=F.silu if given.swiglu else F.gelu,
        num_moe_experts=given.num_experts,
        moe_ffn_hidden_size=given.moe_ffn_hidden_size,
        moe_router_topk=given.moe_router_topk,
        use_cpu_initialization=True,
        **latent,
    )
    if latent:
        spec = specs.get_transformer_block_with_experimental_attention_variant_spec(config)
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=given.num_experts,
            qk_layernorm=given.qk_layernorm,
            normalization=given.normalization,
        )
    model = GPTModel(
        config,
        spec,
        vocab_size=given.padded_vocab_size,
        max_sequence_length=given.seq_length,
        position_embedding_type=given.position_embedding_type,
        share_embeddings_and_output_weights=not given.untie_embeddings_and_output_weights,
    )
    return sum(each.numel() for each in model.parameters())


SMALL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --padded-vocab-size 64 "
    "--seq-length 16 --micro-batch-size 1 --transformer-impl local"
)
LATENT = (
    "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 12 --qk-layernorm --position-embedding-type rope --experimental-attention-variant dsa "
    "--dsa-indexer-n-heads 4 --dsa-indexer-head-dim 8 --dsa-indexer-topk 4"
)
MODELS = (
    "",
    "--normalization RMSNorm",
    "--disable-bias-linear",
    (
        "--disable-bias-linear --add-qkv-bias --normalization RMSNorm --swiglu --qk-layernorm "
        "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights"
    ),
    "--qk-layernorm",
    LATENT,
    f"{LATENT} --normalization RMSNorm --disable-bias-linear",
    "--num-experts 4 --moe-ffn-hidden-size 24 --swiglu",
)


def test_norms_and_biases_are_those_that_megatron_builds(pool):
    lines = [f"{SMALL} {more}" for more in MODELS]
    (built,) = pool.run("tests.tools.planner.test_sizes:parameters", 1, command_lines=lines)
    planned = [
        sum(each.numbers for each in sizes.model_weights(arguments.job_of(line.split()).model))
        for line in lines
    ]
    assert dict(zip(MODELS, planned, strict=True)) == dict(zip(MODELS, built, strict=True))
