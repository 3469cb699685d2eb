"""Jobs in which a flag would do nothing, or would end them late, are refused before training, by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from mindspeed_dsa.features import shipped
from mindspeed_dsa.patches import versions

FEATURES = {feature.name: feature for feature in shipped()}
ENGINE = {"transformer_impl": "transformer_engine"}
MOE = {"num_experts": 8, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
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
    (
        "gradient-accumulation-fusion",
        {"gemm_gradient_accumulation_fusion": True, "gradient_accumulation_fusion": False},
        "contradict each other",
    ),
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
]


@pytest.mark.parametrize(("name", "given", "words"), [*DOES_NOTHING, *ENDS_LATE])
def test_the_job_is_refused(name: str, given: dict[str, Any], words: str) -> None:
    settings = {"megatron_root": "megatron", "dsa_kernel_backend": None, **given}
    with mock.patch.object(versions, "of_job", return_value="0.16.1"):
        problems = FEATURES[name].problems(SimpleNamespace(**settings))
    assert [problem for problem in problems if words in problem], problems
