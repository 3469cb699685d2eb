"""Jobs in which a flag does nothing, changes numbers or ends them late are refused before training."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from mindspeed_dsa.features import shipped
from mindspeed_dsa.features.dsa.repairs.feature import REPAIRS
from mindspeed_dsa.megatron import configuration
from mindspeed_dsa.patches import versions

FEATURES = {feature.name: feature for feature in shipped()}
ENGINE = {"transformer_impl": "transformer_engine"}
MOE = {"num_experts": 8, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
DSA = {"experimental_attention_variant": "dsa"}
HYBRID = {"hybrid_layer_pattern": "M*M*"}
CP = {"context_parallel_size": 2, "cp_shard_vocabulary": True}
SAVED = {
    "save": None,
    "save_hf": "models",
    "save_hf_interval": None,
    "save_hf_like": None,
    "save_hf_fp8_blocks": False,
}
PLACED = {**MOE, "moe_expert_placement": "auto"}

LOCAL_MLA = {"multi_latent_attention": True, "transformer_impl": "local"}
MASKED = {"context_parallel_size": 2, "dataloader_inter_document_masking": True}
SERVED = {**DSA, "use_fused_dsa": True, "dsa_indexer_loss_layers": "served", "release": "0.19.0"}
BLOCKS = {**DSA, "context_parallel_size": 2, "cp_block_rows": 8, "use_fused_dsa": True}

WITHOUT_REPAIRS = ",".join(repair.name for repair in REPAIRS)
CACHED = {"async_save": True, "async_strategy": "nvrx", "ckpt_assume_constant_structure": True}
SHARED = {"reuse_fp32_param": True, "bf16": True}
GROUPED = {**MOE, "moe_grouped_gemm": True, "transformer_impl": "local", "optimizer": "adam"}
SWAPPED = {
    "swap_attention": True,
    "gradient_accumulation_fusion": True,
    "overlap_grad_reduce": True,
    "transformer_engine": "2.12.0",
    **ENGINE,
}

DOES_NOTHING = [
    ("compile-regions", {"multi_latent_attention": False}, "compiles latent attention, which this model"),
    (
        "recompute-norm",
        {"recompute_norm": True, "multi_latent_attention": False, **ENGINE},
        "hold both norms",
    ),
    ("recompute-outputs", {"recompute_verify": True}, "this job frees none"),
    (
        "recompute-outputs",
        {"recompute_verify": True, "recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        "this job frees none",
    ),
    ("fused-adam", {"fused_adam": True, "optimizer": "sgd"}, "--optimizer sgd has another step"),
    ("fused-adam", {"fused_adam": True, "optimizer_cpu_offload": True}, "with --optimizer-cpu-offload"),
    ("fused-adam", {"fused_adam": True, "use_precision_aware_optimizer": True}, "has a step of its own"),
    ("moe-alltoall-overlap-comm", {**MOE, **ENGINE}, "nothing is left to hide transfers"),
    (
        "fused-swiglu",
        {"use_fused_swiglu": True, "use_transformer_engine_op_fuser": True},
        "with --use-transformer-engine-op-fuser",
    ),
    (
        "recompute-activation-function",
        {"recompute_activation_function": True, "use_grouped_gemm_for_shared_expert": True},
        "--use-grouped-gemm-for-shared-expert has the activation inside",
    ),
    ("dsa-kernel-backend", {"dsa_backend": "cpu", "experimental_attention_variant": None}, "has none"),
    ("dsa-kernel-backend", {"dsa_backend": "cpu", "experimental_attention_variant": "dsa"}, "no operator"),
    ("cp-shard-vocabulary", {**CP, **HYBRID}, "and --hybrid-layer-pattern makes another"),
    (
        "schedule-trace",
        {"trace_schedule": "trace", "trace_schedule_step": None, "skip_train": True},
        "--skip-train makes none",
    ),
    ("step-metrics", {"step_metrics_file": "metrics", "skip_train": True}, "--skip-train makes none"),
    ("moe-router-load-report", {**MOE, "moe_router_load_report": "load", "skip_train": True}, "makes none"),
]
ENDS_LATE = [
    ("pack-documents", {"tensor_parallel_num_weight_shards": 2}, "which read other documents"),
    (
        "moe-fb-overlap",
        {**MOE, "moe_fb_overlap": True, "mtp_detach_heads": True},
        "detaches hidden states in a forward",
    ),
    ("save-hf", {**SAVED, **HYBRID}, "of GPT models alone"),
    ("save-hf", {**SAVED, "mla_down_proj_fusion": True}, "omit --mla-down-proj-fusion"),
    ("moe-expert-placement", {**PLACED, "moe_routing_trace_path": "x"}, "would record places for experts"),
    (
        "moe-batch-overlap",
        {**MOE, "moe_batch_overlap": True, "moe_routing_trace_path": "x"},
        "records one routing for each layer and microbatch",
    ),
    (
        "moe-batch-overlap",
        {
            **MOE,
            "moe_batch_overlap": True,
            "moe_batch_overlap_attention": True,
            "moe_router_force_biased": 0.1,
        },
        "draws other random numbers for halves",
    ),
    (
        "dualpipev",
        {"schedules_method": "dualpipev", "moe_paged_stash": True},
        "is reset by Megatron's own schedules alone",
    ),
    ("dense-context-parallel", {**LOCAL_MLA, "reset_attention_mask": True}, "--reset-attention-mask: latent"),
    ("dense-context-parallel", {**LOCAL_MLA, "attention_dropout": 0.1}, "use --attention-dropout 0"),
    ("pad-sequences", MASKED, "--dataloader-inter-document-masking: its batches describe their documents"),
    ("cp-block-rows", {**BLOCKS, "sft": True}, "omit it or --sft"),
    (
        "dsa-kernel-backend",
        {**SERVED, "context_parallel_size": 2, "sft": True},
        "attends itself to packs of --sft",
    ),
    (
        "swap-optimizer",
        {"swap_optimizer": True, "use_distributed_optimizer": True, "cuda_graph_impl": "full_iteration"},
        "state is loaded early, while gradients are reduced",
    ),
    ("swap-attention", SWAPPED, "forgets which weight a swapped tensor is"),
]
WRONG_NUMBERS = [
    ("reuse-fp32-param", {**SHARED, **CACHED}, "float32 weights lie elsewhere in each save"),
    ("reuse-fp32-param", {**SHARED, "moe_single_grouped_weight": True}, "keeps reading the memory"),
    ("moe-grouped-gemm", {**GROUPED, **CACHED, "gemm_weight_layout": "kn"}, "matrices of experts lie"),
    ("cp-block-rows", {**BLOCKS, "hybrid_layer_pattern": "MDMD"}, "layers of --hybrid-layer-pattern expect"),
    ("dsa-context-parallel", {**SERVED, **MASKED}, "attends as if each document lay in two chunks"),
    (
        "dense-context-parallel",
        {**LOCAL_MLA, **MASKED, "num_attention_heads": 4},
        "expects two chunks of each document",
    ),
    ("dsa-repairs", {"hybrid_layer_pattern": "MDMD"}, "--hybrid-layer-pattern has DSA layers (D)"),
    ("dsa-repairs", {"hybrid_override_pattern": "MDMD"}, "--hybrid-override-pattern has DSA layers (D)"),
    ("fused-dsa", {**SERVED, "hybrid_layer_pattern": "MDMD"}, "weighs losses by layers of GPT models"),
]


NEIGHBOURS = [
    ("compile-regions", {"multi_latent_attention": True}),
    (
        "recompute-norm",
        {"recompute_norm": True, "multi_latent_attention": True, "num_experts": None, **ENGINE},
    ),
    ("recompute-norm", {"recompute_norm": True, "multi_latent_attention": False, **MOE, **ENGINE}),
    ("recompute-outputs", {"recompute_verify": True, "recompute_norm": True}),
    ("fused-adam", {"fused_adam": True, "optimizer": "muon"}),
    ("fused-adam", {"fused_adam": None, "optimizer": "sgd"}),
    ("moe-alltoall-overlap-comm", {**MOE, **ENGINE, "moe_shared_expert_intermediate_size": 8}),
    ("fused-swiglu", {"use_fused_swiglu": True, "use_transformer_engine_op_fuser": True, **MOE}),
    ("dsa-kernel-backend", {"dsa_backend": "cpu", "use_fused_dsa": True, **DSA}),
    ("cp-shard-vocabulary", {**CP, "padded_vocab_size": 64}),
    ("pack-documents", {"tensor_parallel_num_weight_shards": 2, "tensor_model_parallel_size": 2}),
    ("moe-batch-overlap", {**MOE, "moe_batch_overlap": True}),
    ("moe-batch-overlap", {**MOE, "moe_batch_overlap": True, "moe_router_force_biased": 0.1}),
    (
        "moe-batch-overlap",
        {
            **MOE,
            "moe_batch_overlap": True,
            "moe_batch_overlap_attention": True,
            "moe_router_force_biased": None,
        },
    ),
    ("dense-context-parallel", {**LOCAL_MLA, "dataloader_inter_document_masking": True}),
    ("dense-context-parallel", {"attention_dropout": 0.1, **ENGINE}),
    ("cp-block-rows", BLOCKS),
    ("dsa-context-parallel", {**DSA, "context_parallel_size": 2, "use_fused_dsa": True, "sft": True}),
    ("dsa-kernel-backend", {**SERVED, "sft": True}),
    ("dsa-repairs", {"hybrid_layer_pattern": "M*M*"}),
    ("reuse-fp32-param", {**SHARED, **CACHED, "async_ckpt_use_cpu_shm": True}),
    ("reuse-fp32-param", {**SHARED, **CACHED, "async_strategy": "mcore"}),
    ("dsa-repairs", {"hybrid_layer_pattern": "MDMD", "no_dsa_repairs": WITHOUT_REPAIRS}),
    ("moe-grouped-gemm", {**GROUPED, **CACHED, "gemm_weight_layout": "nk"}),
    ("swap-attention", {**SWAPPED, "transformer_engine": "2.15.0"}),
    ("swap-attention", {**SWAPPED, "overlap_grad_reduce": False}),
    ("dsa-repairs", {**DSA, "hybrid_layer_pattern": "MDMD"}),
]
"""Jobs beside them that train."""


def problems(name: str, given: dict[str, Any]) -> list[str]:
    settings = {"megatron_root": "megatron", "dsa_kernel_backend": None, "num_experts": None, **given}
    find, installed = importlib.util.find_spec, versions.of_package
    with (
        mock.patch.object(versions, "of_package", lambda name: given.get(name) or installed(name)),
        mock.patch.object(versions, "of_job", return_value=given.get("release", "0.16.1")),
        mock.patch.object(
            configuration, "find_spec", lambda module: module == "transformer_engine" or find(module)
        ),
    ):
        return FEATURES[name].problems(SimpleNamespace(**settings))


@pytest.mark.parametrize(("name", "given", "words"), [*DOES_NOTHING, *ENDS_LATE, *WRONG_NUMBERS])
def test_the_job_is_refused(name: str, given: dict[str, Any], words: str) -> None:
    said = problems(name, given)
    assert [problem for problem in said if words in problem], said


@pytest.mark.parametrize(("name", "given"), NEIGHBOURS)
def test_its_neighbour_trains(name: str, given: dict[str, Any]) -> None:
    assert problems(name, given) == []


def test_a_configurations_default_says_nothing_about_its_modules() -> None:
    """Megatron's default is Transformer Engine, whatever specification a loop of one's own builds."""
    given = {"num_moe_experts": None, "multi_latent_attention": False, "recompute_norm": True, **ENGINE}
    with mock.patch.object(configuration, "find_spec", return_value=object()):
        assert FEATURES["recompute-norm"].problems(SimpleNamespace(**given)) == []
        layer = SimpleNamespace(**ENGINE, num_moe_experts=8, expert_model_parallel_size=2)
        assert FEATURES["moe-alltoall-overlap-comm"].problems(layer) == []
