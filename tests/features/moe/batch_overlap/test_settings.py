"""Settings that overlapped halves refuse before training."""

from __future__ import annotations

from argparse import Namespace

import pytest

from mindspeed_dsa.features.moe.batch_overlap.feature import FEATURE
from tests.support import moe

EP2 = {
    "moe_batch_overlap": True,
    "num_experts": 8,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
    "cuda_graph_impl": "none",
}
ALWAYS = {"moe_batch_overlap_always": True}
DSA = {"experimental_attention_variant": "dsa", "dsa_indexer_topk": 4, "dsa_indexer_loss_coeff": 1.0}
ONE = {"micro_batch_size": 1, "seq_length": 8, "multi_latent_attention": True}


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ({"num_experts": None}, "--num-experts"),
        ({"expert_model_parallel_size": 1}, "--expert-model-parallel-size 1"),
        ({"expert_tensor_parallel_size": 2}, "--expert-tensor-parallel-size 1"),
        ({"tensor_model_parallel_size": 2}, "--expert-tensor-parallel-size 1"),
        ({"moe_token_dispatcher_type": "allgather"}, "--moe-token-dispatcher-type allgather"),
        ({"moe_token_dispatcher_type": "flex"}, "--moe-token-dispatcher-type flex"),
        ({"moe_pad_expert_input_to_capacity": True}, "--moe-pad-expert-input-to-capacity"),
        ({"moe_shared_expert_overlap": True}, "--moe-shared-expert-overlap"),
        ({"overlap_moe_expert_parallel_comm": True}, "--overlap-moe-expert-parallel-comm"),
        ({"delay_wgrad_compute": True}, "--delay-wgrad-compute"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
        ({"fine_grained_activation_offloading": True}, "--fine-grained-activation-offloading"),
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, "--fp8-recipe tensorwise"),
        ({"fp4": "e2m1"}, "--fp4-recipe nvfp4"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl"),
        ({"deterministic_mode": True}, "--moe-batch-overlap-always"),
        ({"moe_enable_routing_replay": True}, "--moe-batch-overlap-always"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_in_one_sentence(arguments, flag):
    moe.assert_refused(FEATURE, EP2, arguments, "--moe-batch-overlap", flag)


ATTENTION = {**EP2, **ALWAYS, "moe_batch_overlap_attention": True, "micro_batch_size": 2}


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ({"moe_expert_capacity_factor": 1.0}, "--moe-expert-capacity-factor"),
        ({"moe_input_jitter_eps": 0.1}, "--moe-input-jitter-eps"),
        ({"hidden_dropout": 0.1}, "use --hidden-dropout 0, or omit"),
        ({"attention_dropout": 0.1}, "--attention-dropout"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
        ({"moe_router_load_balancing_type": ["sinkhorn"]}, "sinkhorn"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
            "--recompute-granularity full",
        ),
        ({"pack_documents": True}, "--pack-documents"),
        ({**DSA, "dsa_stage": "warmup"}, "--dsa-stage warmup"),
        ({**DSA, "dsa_indexer_topk_freq": 2}, "share a selection"),
        ({**DSA, "calculate_per_token_loss": True}, "--calculate-per-token-loss"),
        ({**ONE, "sequence_parallel": True}, "--micro-batch-size 2"),
        ({**ONE, "apply_rope_fusion": True}, "add --no-rope-fusion, use --micro-batch-size 2"),
        ({**ONE, "context_parallel_size": 2}, "--micro-batch-size 2"),
        ({**ONE, "seq_length": 5}, "--micro-batch-size 2"),
        ({**ONE, "multi_latent_attention": False}, "latent attention alone"),
        ({**ONE, "transformer_impl": "transformer_engine"}, "--transformer-impl local"),
        ({**ONE, **DSA}, "--use-fused-dsa"),
        (
            {**ONE, "recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
            "mla_up_proj",
        ),
    ],
    ids=str,
)
def test_attention_refused_in_one_sentence(arguments, flag):
    moe.assert_refused(FEATURE, ATTENTION, arguments, "--moe-batch-overlap-attention", flag)


def test_rows_of_one_sequence():
    assert not FEATURE.problems(Namespace(**{**ATTENTION, **ONE}))
    assert not FEATURE.problems(Namespace(**{**ATTENTION, **ONE, **DSA, "use_fused_dsa": True}))


def test_deterministic_without_measuring():
    assert not FEATURE.problems(Namespace(**EP2, **ALWAYS, deterministic_mode=True))


@pytest.mark.parametrize("option", ["always", "attention"])
def test_option_without_switch(option):
    arguments = Namespace(**{**EP2, f"moe_batch_overlap_{option}": True, "moe_batch_overlap": False})
    assert FEATURE.is_active(arguments)
    (problem,) = FEATURE.problems(arguments)
    assert f"--moe-batch-overlap-{option} has no effect without --moe-batch-overlap" in problem
