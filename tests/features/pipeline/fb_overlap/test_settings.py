"""Settings that paired forwards and backwards refuse before training."""

from __future__ import annotations

from argparse import Namespace

import pytest

from mindspeed_dsa.features import all_features
from mindspeed_dsa.features.pipeline.fb_overlap.feature import FEATURE, Options, check_overlap
from mindspeed_dsa.session import checks
from tests.support import moe

SERVED = {
    "num_experts": 8,
    "expert_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
    "mtp_num_layers": 1,
    "recompute_granularity": "selective",
    "recompute_modules": [
        *("core_attn", "mla_up_proj", "layernorm", "mlp", "moe", "shared_experts", "moe_act"),
    ],
    "global_batch_size": 8,
    "micro_batch_size": 1,
    "data_parallel_size": 4,
    "cuda_graph_impl": "none",
}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_experts": None}, "--num-experts"),
        ({"expert_model_parallel_size": 1}, "--expert-model-parallel-size 1"),
        ({"moe_token_dispatcher_type": "allgather"}, "--moe-token-dispatcher-type allgather"),
        ({"moe_token_dispatcher_type": "flex"}, "--moe-token-dispatcher-type flex"),
        ({"virtual_pipeline_model_parallel_size": None}, "--num-virtual-stages-per-pipeline-rank"),
        ({"mtp_num_layers": 2}, "set --mtp-num-layers 1"),
        ({"pack_documents": True}, "omit --pack-documents or --mtp-num-layers"),
        ({"moe_layer_freq": [0, 1, 0], "num_layers": 3}, "--moe-layer-freq gives the last layer none"),
        ({"moe_layer_freq": 2, "num_layers": 4}, "--moe-layer-freq gives the last layer none"),
        ({"sft": True}, "--sft, which describes documents that Megatron-LM's script does not pass"),
        ({"dataloader_inter_document_masking": True}, "--dataloader-inter-document-masking, which describes"),
        ({"global_batch_size": 4}, "--global-batch-size 8"),
        (
            {"pipeline_model_parallel_size": 1, "mtp_num_layers": None, "global_batch_size": 4},
            "1 microbatch,",
        ),
        (
            {"global_batch_size": 4, "step_batch_size_schedule": "0:4 1B:32"},
            "(--step-batch-size-schedule '0:8 1B:32')",
        ),
        (
            {"eval_global_batch_size": 4, "eval_micro_batch_size": 1},
            "interleaves 2 in a pipeline; use --eval-global-batch-size 8, or a smaller --eval-micro-",
        ),
        ({"eval_micro_batch_size": 2}, "--eval-global-batch-size 16"),
        ({"distribute_saved_activations": True}, "omit --distribute-saved-activations"),
        ({"recompute_granularity": "full", "fp8": "hybrid"}, "--fp8-recipe blockwise or mxfp8"),
        ({"fp8": "hybrid", "fp8_recipe": "custom"}, "--recompute-modules moe"),
        ({"moe_shared_expert_overlap": True}, "--moe-shared-expert-overlap"),
        ({"delay_wgrad_compute": True}, "--delay-wgrad-compute"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_in_one_sentence(arguments, words):
    moe.assert_refused(FEATURE, SERVED, arguments, "--moe-fb-overlap", words)


@pytest.mark.parametrize(
    "given",
    [
        {"global_batch_size": 4, "step_batch_size_schedule": "0:8 1B:32", "eval_global_batch_size": 8},
        {"eval_global_batch_size": 4, "eval_iters": 0},
        {"eval_global_batch_size": 4, "schedules_method": "dualpipev"},
        {"eval_global_batch_size": 4, "pipeline_model_parallel_size": 1},
        {"step_batch_size_schedule": "0:4 1B:8", "pipeline_model_parallel_size": 1},
    ],
    ids=str,
)
def test_batches_that_are_served(given):
    args = Namespace(**{**SERVED, **given})
    assert list(check_overlap(args, Options(counts_uses=True))) == []


@pytest.mark.parametrize("shared", [{"mtp_num_layers": 1}, {"untie_embeddings_and_output_weights": False}])
def test_two_backwards_of_the_embedding_need_a_release_that_counts_them(shared):
    arguments = {**SERVED, "mtp_num_layers": None, "pipeline_model_parallel_size": 1, **shared}
    args, old = Namespace(**arguments, overlap_grad_reduce=True), Options(counts_uses=False)
    (problem,) = check_overlap(args, old)
    assert "upgrade to 0.16 or omit --overlap-grad-reduce" in problem
    assert list(check_overlap(args, Options(counts_uses=True))) == []
    assert list(check_overlap(Namespace(**arguments, overlap_grad_reduce=False), old)) == []
    args.pipeline_model_parallel_size = 2  # each stage has a separate embedding
    assert list(check_overlap(args, old)) == []


def test_recomputation_of_whole_layers_is_served():
    for method in ("uniform", "block"):
        full = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": 2}
        args = Namespace(**{**SERVED, **full, "recompute_modules": None})
        assert list(check_overlap(args, Options(counts_uses=True))) == []


def test_features_that_work_in_a_layers_forward_are_served_or_named():
    # The features that megatron/split_layers.py supports.
    served = {"recompute-norm", "swap-attention", "record-collectives"}
    # Routers do not count rows per document there, as documented on its page.
    served.add("pack-documents")
    whole = {
        feature.name
        for feature in all_features()
        if any(patch.target.endswith("TransformerLayer.forward") for patch in feature.patches)
    }
    refused = {conflict.feature for conflict in FEATURE.conflicts}
    refused |= {
        feature.name
        for feature in all_features()
        if any(conflict.feature == FEATURE.name for conflict in feature.conflicts)
    }
    assert served <= whole
    assert whole - served <= refused
    assert "moe-alltoall-overlap-comm" in refused
    assert refused <= {feature.name for feature in all_features()} - served


@pytest.mark.parametrize("release", ["0.12.1", "0.13.1"])
def test_older_releases_are_told_what_to_install(monkeypatch, release):
    monkeypatch.setattr(checks.versions, "of_distribution", lambda *_: release)
    settings = Namespace(platform="cpu", megatron_root="megatron", chosen=dict)
    (problem,) = checks.problems([FEATURE], settings)
    assert "moe-fb-overlap" in problem
    assert f"needs megatron-core >=0.14,<0.21, but {release} is installed; install a release" in problem


def test_a_configuration_is_refused_too(pool):
    """The config check covers jobs without Megatron's parser."""
    (error,) = pool.run(
        "tests.support.model:error_of",
        1,
        case="tests.support.model:run",
        switches={"moe_fb_overlap": True},
    )
    assert "--moe-fb-overlap: with --expert-model-parallel-size 1 no token leaves its rank" in error


def test_megatrons_own_overlap_gives_way():
    args = Namespace(moe_shared_expert_overlap=True)
    (line,) = FEATURE.rewrite(args)
    assert not args.moe_shared_expert_overlap
    assert "--moe-fb-overlap, in place of --moe-shared-expert-overlap" in line
    assert FEATURE.rewrite(args) == []
