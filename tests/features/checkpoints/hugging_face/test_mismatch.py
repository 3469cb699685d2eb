"""Differences between files and a job, each reported with the flag that fixes it, and accepted
differences.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from mindspeed_dsa.features.checkpoints.hugging_face.mismatch import (
    adds_indexers,
    mismatches,
    problems,
    remarks,
)
from mindspeed_dsa.features.checkpoints.hugging_face.written_config import config_of
from mindspeed_dsa.patches.errors import SettingsError
from tests.features.checkpoints.hugging_face.models import (
    GROUPED,
    KINDS,
    LLAMA_3,
    YARN,
    arguments,
    config,
    job,
)

pytest.importorskip("transformers", minversion="5.23")

RELEASES = ("0.12.1", "0.16.1", "0.19.0")
SHARED = {"index_topk_freq": 2, "index_skip_topk_offset": 2}
UNLIKE_ANY = [
    ({"activation_func_clamp_value": 7.0}, "omit --activation-func-clamp-value"),
    ({"activation_func_clamp_value": 0.0}, "omit --activation-func-clamp-value"),
    ({"glu_linear_offset": 1.0}, "give --glu-linear-offset 0.0"),
    ({"moe_mlp_glu_interleave_size": 32}, "omit --moe-mlp-glu-interleave-size"),
    ({"moe_shared_expert_glu_interleave_size": 32}, "omit --moe-shared-expert-glu-interleave-size"),
    ({"layernorm_zero_centered_gamma": True}, "omit --apply-layernorm-1p"),
    ({"moe_apply_probs_on_input": True}, "omit --moe-apply-probs-on-input"),
    ({"moe_router_load_balancing_type": "sinkhorn"}, "give --moe-router-load-balancing-type aux_loss"),
    ({"moe_router_load_balancing_type": ["sinkhorn"]}, "give --moe-router-load-balancing-type aux_loss"),
    ({"moe_router_load_balancing_type": "quantile_balancing"}, "is quantile_balancing here and top-k of"),
    ({"softmax_type": "off-by-one"}, "give --softmax-type vanilla"),
    ({"softmax_type": "learnable"}, "give --softmax-type vanilla"),
    ({"use_mup": True}, "omit --use-mup"),
    ({"window_size": (127, 0)}, "omit --window-size"),
]
"""Arguments of models that no architecture is, and the advice."""
USUAL = {
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "moe_mlp_glu_interleave_size": None,
    "moe_shared_expert_glu_interleave_size": None,
    "layernorm_zero_centered_gamma": False,
    "moe_apply_probs_on_input": False,
    "moe_router_load_balancing_type": ["seq_aux_loss", "aux_loss"],
    "softmax_type": "vanilla",
    "use_mup": False,
    "window_attn_skip_freq": 4,
    "window_size": None,
}
"""Values of these arguments in a job of any architecture."""
STRETCHED = {
    "rope_parameters": YARN | {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0}
}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "changed", [{}, STRETCHED, {"n_group": 1, "topk_group": 1}], ids=("", "yarn", "groups")
)
def test_a_job_made_of_a_description_has_none(kind, changed, release):
    read = arguments(kind, **changed)
    # A job that states nothing contradicts nothing.
    assert mismatches(read, job(read, release), release) == []
    assert mismatches(read, SimpleNamespace(), release) == [], "what is not said is not judged"


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("kind", GROUPED)
def test_a_job_of_grouped_queries_made_of_a_description_has_none(kind, release):
    found = arguments(kind)
    if kind == "qwen2_moe" and release == "0.12.1":
        (lacking,) = mismatches(found, job(found, release), release)
        assert "the shared expert has a gate" in lacking
    else:
        assert mismatches(found, job(found, release), release) == []
        assert mismatches(found, SimpleNamespace(), release) == [], "what is not said is not judged"


@pytest.mark.parametrize(
    ("kind", "here", "mended"),
    [
        ("qwen3", {"num_query_groups": 4}, "num_query_groups is 4 here and 2 in the files"),
        (
            "qwen3",
            {"group_query_attention": False},
            "is 8 here and 2 in the files",
        ),
        ("qwen3", {"kv_channels": None}, "kv_channels is 8 here and 16 in the files: give --kv-channels 16"),
        ("qwen3", {"qk_layernorm": False}, "give --qk-layernorm"),
        ("qwen3", {"num_experts": 8}, "num_experts is 8 here and None in the files: omit --num-experts"),
        ("qwen3", {"multi_latent_attention": True}, "omit --multi-latent-attention"),
        ("qwen3", {"experimental_attention_variant": "dsa"}, "omit --experimental-attention-variant"),
        ("qwen3", {"position_embedding_type": "none"}, "give --position-embedding-type rope"),
        ("qwen3", {"rotary_base": 500000}, "give --rotary-base 10000"),
        ("qwen3", {"rotary_percent": 0.5}, "give --rotary-percent 1.0"),
        ("qwen3", {"use_rope_scaling": True}, "omit --use-rope-scaling"),
        ("qwen3", {"mtp_num_layers": 1}, "omit --mtp-num-layers"),
        ("qwen2", {"add_qkv_bias": False}, "add_qkv_bias is False here and True in the files"),
        ("qwen2_moe", {"moe_shared_expert_gate": False}, "give --moe-shared-expert-gate"),
        ("qwen2_moe", {"moe_router_pre_softmax": False}, "give --moe-router-pre-softmax"),
        ("mixtral", {"moe_router_pre_softmax": True}, "omit --moe-router-pre-softmax"),
        ("mixtral", {"moe_router_score_function": "sigmoid"}, "give --moe-router-score-function softmax"),
        ("mixtral", {"moe_ffn_hidden_size": 32}, "give --moe-ffn-hidden-size 128"),
        ("llama", {"use_rope_scaling": False}, "give --use-rope-scaling"),
        ("llama", {"rope_scaling_factor": 32.0}, "give --rope-scaling-factor 8.0"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_difference_of_grouped_queries_is_said_with_its_flag(kind, here, mended):
    found = arguments(kind, **({"rope_parameters": LLAMA_3} if kind == "llama" else {}))
    (said,) = mismatches(found, job(found, "0.16.1", **here), "0.16.1")
    assert mended in said


@pytest.mark.parametrize(
    ("here", "mended"),
    [
        ({"num_layers": 4}, "num_layers is 4 here and 6 in the files: give --num-layers 6"),
        ({"hidden_size": 32}, "give --hidden-size 64"),
        ({"ffn_hidden_size": 32}, "give --ffn-hidden-size 128"),
        ({"num_attention_heads": 8}, "give --num-attention-heads 4"),
        ({"multi_latent_attention": False}, "give --multi-latent-attention"),
        ({"q_lora_rank": None}, "q_lora_rank is None here and 40 in the files: give --q-lora-rank 40"),
        ({"kv_lora_rank": 512}, "give --kv-lora-rank 24"),
        ({"qk_head_dim": 128}, "give --qk-head-dim 16"),
        ({"qk_pos_emb_head_dim": 64}, "give --qk-pos-emb-head-dim 8"),
        ({"v_head_dim": 128}, "give --v-head-dim 12"),
        ({"qk_layernorm": False}, "give --qk-layernorm"),
        ({"num_experts": 16}, "give --num-experts 8"),
        ({"num_experts": None}, "num_experts is None here and 8 in the files: give --num-experts 8"),
        ({"moe_layer_freq": 1}, "moe_layer_freq is ([1]*6) here and ([0]*2+[1]*4) in the files"),
        ({"moe_layer_freq": [0, 0, 0, 1, 1, 1]}, "give --moe-layer-freq '([0]*2+[1]*4)'"),
        ({"moe_ffn_hidden_size": None}, "moe_ffn_hidden_size is 128 here and 32 in the files"),
        ({"moe_shared_expert_intermediate_size": 32}, "give --moe-shared-expert-intermediate-size 64"),
        ({"moe_router_topk": 2}, "give --moe-router-topk 4"),
        ({"moe_router_score_function": "softmax"}, "give --moe-router-score-function sigmoid"),
        ({"moe_router_enable_expert_bias": False}, "give --moe-router-enable-expert-bias"),
        ({"moe_router_num_groups": 2}, "moe_router_group_topk is None here and 2 in the files"),
        ({"moe_router_group_topk": None}, "give --moe-router-num-groups 4"),
        ({"moe_router_group_topk": 1}, "give --moe-router-group-topk 2"),
        ({"moe_router_topk_scaling_factor": None}, "give --moe-router-topk-scaling-factor 2.5"),
        ({"moe_latent_size": 64}, "omit --moe-latent-size"),
        ({"moe_shared_expert_gate": True}, "omit --moe-shared-expert-gate"),
        *UNLIKE_ANY,
        ({"swiglu": False}, "give --swiglu"),
        ({"add_bias_linear": True}, "give --disable-bias-linear"),
        ({"add_qkv_bias": True}, "omit --add-qkv-bias"),
        ({"normalization": "LayerNorm"}, "give --normalization RMSNorm"),
        (
            {"layernorm_epsilon": 1e-5},
            "norm_epsilon is 1e-05 here and 1e-06 in the files: give --norm-epsilon 1e-06",
        ),
        ({"untie_embeddings_and_output_weights": False}, "give --untie-embeddings-and-output-weights"),
        ({"position_embedding_type": "learned_absolute"}, "give --position-embedding-type rope"),
        (
            {"rotary_base": 8000000},
            "rotary_base is 8000000 here and 10000 in the files: give --rotary-base 10000",
        ),
        ({"rotary_interleaved": True}, "omit --rotary-interleaved"),
        ({"padded_vocab_size": 896}, "padded_vocab_size is 896 here and 1000 in the files"),
        ({"padded_vocab_size": None, "vocab_size": 999}, "give --padded-vocab-size 1000 or more"),
        (
            {"padded_vocab_size": None, "vocab_size": 992, "make_vocab_size_divisible_by": 8},
            "vocab_size is 992 here and 1000 in the files",
        ),
        ({"mtp_num_layers": 2}, "give --mtp-num-layers 1"),
        ({"experimental_attention_variant": None}, "give --experimental-attention-variant dsa"),
        ({"dsa_indexer_n_heads": 64}, "give --dsa-indexer-n-heads 3"),
        ({"dsa_indexer_head_dim": 128}, "give --dsa-indexer-head-dim 32"),
        ({"dsa_indexer_topk": 2048}, "give --dsa-indexer-topk 16"),
        ({"dsa_indexer_rope_first": None}, "dsa_indexer_rope_first is False here and True in the files"),
        ({"dsa_indexer_rope_first": False}, "give --dsa-indexer-rope-first"),
        ({"dsa_indexer_normalised_query": None}, "give --dsa-indexer-normalised-query"),
        ({"dsa_indexer_rope_interleaved": False}, "give --dsa-indexer-rope-interleaved"),
        ({"dsa_indexer_scoring_relu": False}, "omit --no-dsa-indexer-scoring-relu"),
        ({"dsa_indexer_k_norm_epsilon": 1e-5}, "give --dsa-indexer-k-norm-epsilon 1e-06"),
        (
            {"dsa_indexer_k_norm_epsilon": None, "layernorm_epsilon": 1e-5},
            "give --dsa-indexer-k-norm-epsilon 1e-06",
        ),
        (
            {"dsa_indexer_topk_freq": 1},
            "select keys here and 4 of 6 layers (1, 2, 4, 6) in the files: give --dsa-indexer-topk-freq 2",
        ),
        (
            {"dsa_indexer_topk_freq": 1, "dsa_indexer_topk_pattern": "FFSFFF"},
            "give --dsa-indexer-topk-freq 2",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_difference_is_said_with_its_flag(here, mended):
    found = arguments("glm_moe_dsa", **SHARED, rms_norm_eps=1e-6)
    said = mismatches(found, job(found, "0.16.1", **here), "0.16.1")
    assert mended in "; ".join(said)
    # One sentence, with one flag behind a colon.
    assert all(" here and " in sentence and sentence.count(": ") == 1 for sentence in said)


@pytest.mark.parametrize("kind", [*KINDS, *GROUPED])
@pytest.mark.parametrize(("here", "mended"), UNLIKE_ANY, ids=str)
def test_a_part_that_no_architecture_has_is_refused_both_ways(kind, here, mended, tmp_path):
    """Reading files into such a job, and writing its weights, would give other outputs."""
    found = arguments(kind)
    assert mismatches(found, job(found, "0.16.1", **USUAL), "0.16.1") == []
    config_of(job(found, "0.16.1", **USUAL), "0.16.1", "test")
    trained = job(found, "0.16.1", **{**USUAL, **here})
    if "num_experts" in found and not found["num_experts"] and next(iter(here)).startswith("moe_"):
        assert mismatches(found, trained, "0.16.1") == [], "a dense model routes nothing"
        return
    (tmp_path / "config.json").write_text(json.dumps(config(kind)))
    said = next(problems(trained, tmp_path, "0.16.1"))
    assert mended in said
    assert next(iter(here)).replace("layernorm_zero_centered_gamma", "apply_layernorm_1p") in said
    with pytest.raises(SettingsError, match=mended):
        config_of(trained, "0.16.1", "test")


@pytest.mark.parametrize(
    ("release", "here", "mended"),
    [
        ("0.16.1", {"rope_type": "rope"}, "--rotary-scaling-factor 4.0 --rope-type yarn"),
        (
            "0.16.1",
            {"rotary_scaling_factor": 40.0},
            "yarn with a factor of 40 here and yarn with 4 in the files",
        ),
        ("0.12.1", {"rotary_scaling_factor": 1.0}, "in the files: give --rotary-scaling-factor 4.0"),
        (
            "0.16.1",
            {"yarn_original_max_position_embeddings": None},
            "--yarn-original-max-position-embeddings 32",
        ),
        ("0.12.1", {"max_position_embeddings": 128}, "give --max-position-embeddings 32"),
        (
            "0.19.0",
            {"yarn_beta_fast": None},
            "beta_fast is 32 here and 16 in the files: give --yarn-beta-fast 16.0",
        ),
        ("0.16.1", {"yarn_beta_slow": 2.0}, "give --yarn-beta-slow 1.0"),
        ("0.16.1", {"mscale_all_dim": 0.0}, "give --mscale 1 --mscale-all-dim 1"),
        ("0.12.1", {"mscale": 0.707}, "give --mscale 1 --mscale-all-dim 1"),
    ],
)
def test_rotary_embeddings_that_differ(release, here, mended):
    found = arguments("deepseek_v32", **STRETCHED)
    (said,) = mismatches(found, job(found, release, **here), release)
    assert mended in said


def test_plain_files_beside_stretched_jobs():
    read = arguments("deepseek_v3")
    (said,) = mismatches(read, job(read, "0.16.1", rope_type=None, rotary_scaling_factor=40.0), "0.16.1")
    assert said.endswith("rope with 1 in the files: give --rotary-scaling-factor 1.0 --rope-type rope")
    # Rope type "rope" keeps YaRN's factor of attention scores.
    here = job(read, "0.16.1", rotary_scaling_factor=40.0, mscale_all_dim=1.0)
    (said,) = mismatches(read, here, "0.16.1")
    assert "attention's scores by 1.87385 here" in said
    assert "give --rotary-scaling-factor 1.0" in said


def test_a_release_that_cannot_is_named():
    found = arguments("deepseek_v3", rope_parameters=YARN | {"mscale": 0.5})
    assert mismatches(found, job(found, "0.16.1"), "0.16.1") == []
    (said,) = mismatches(found, job(found, "0.12.1"), "0.12.1")
    assert "Megatron-core 0.12.1 scales attention with --mscale for both; train with 0.14 or later" in said


def test_what_a_job_leaves_open_the_release_decides():
    read = arguments("deepseek_v32")
    names = ("dsa_indexer_rope_first", "dsa_indexer_normalised_query")
    # The first two releases have other defaults.
    for release, count in zip(RELEASES, (2, 2, 0), strict=True):
        open_job = job(read, release, **dict.fromkeys(names))
        assert len(mismatches(read, open_job, release)) == count, release
    last = job(read, "0.19.0", dsa_indexer_rope_first=False)
    assert "omit --no-dsa-indexer-rope-first" in mismatches(read, last, "0.19.0")[0]


@pytest.mark.parametrize(
    "same",
    [
        {"padded_vocab_size": 4096},
        {"padded_vocab_size": None, "vocab_size": 993, "make_vocab_size_divisible_by": 8},
        {"moe_layer_freq": [False, False, True, True, True, True]},
        {"position_embedding_type": "none"},
        {"dsa_indexer_rotate_activation": True},
        {"dsa_indexer_topk_freq": 1, "dsa_indexer_topk_pattern": "CCSCSC"},
        {"rope_type": "yarn"},
        {"hidden_dropout": 0.1},
        {"moe_router_dtype": None},
        {"mtp_num_layers": None},
        {"mtp_num_layers": 3, "mtp_use_repeated_layer": True},
    ],
    ids=str,
)
def test_another_way_to_say_the_same(same):
    found = arguments("glm_moe_dsa", **SHARED)
    assert mismatches(found, job(found, "0.19.0", **same), "0.19.0") == []


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_a_width_of_dense_layers_counts_where_a_layer_is_dense(kind):
    found = arguments(kind)
    here = job(found, "0.16.1", ffn_hidden_size=512)
    assert mismatches(found, here, "0.16.1") == []
    written = config_of(here, "0.16.1", "test")
    assert written["intermediate_size"] == (128 if kind == "mixtral" else 512)
    (said,) = mismatches(found, job(found, "0.16.1", ffn_hidden_size=512, moe_ffn_hidden_size=None), "0.16.1")
    assert "moe_ffn_hidden_size is 512 here" in said
    if kind != "mixtral":
        found = arguments(kind, mlp_only_layers=[1])
        (said,) = mismatches(found, job(found, "0.16.1", ffn_hidden_size=512), "0.16.1")
        assert said.startswith("ffn_hidden_size is 512 here and 128 in the files")


def test_groups_that_exclude_no_expert():
    found = arguments("deepseek_v3", n_group=1, topk_group=1)
    here = job(found, "0.16.1", moe_router_num_groups=4, moe_router_group_topk=4)
    assert mismatches(found, here, "0.16.1") == []


def test_all_differences_at_once():
    found = arguments("deepseek_v32")
    here = job(found, "0.16.1", hidden_size=32, rotary_base=1, dsa_indexer_topk=1, moe_router_topk=2)
    said = " ".join(mismatches(found, here, "0.16.1"))
    for flag in ("--hidden-size 64", "--rotary-base 10000", "--dsa-indexer-topk 16", "--moe-router-topk 4"):
        assert flag in said


def test_configurations_of_megatron_are_judged_as_well():
    # A TransformerConfig has its own field names, and is built here as a job builds it.
    core = pytest.importorskip("megatron.core.transformer.transformer_config")
    import mindspeed_dsa
    from mindspeed_dsa.patches import versions

    release = versions.of_megatron()
    read = arguments("deepseek_v32", **STRETCHED)
    values = job(read, release).__dict__
    options = {"dsa_indexer_rope_first": True, "dsa_indexer_normalised_query": True}
    with mindspeed_dsa.enabled(**options):
        import torch

        known = core.MLATransformerConfig.__dataclass_fields__
        # This release's config may lack some of the names.
        fields = {name: value for name, value in {**read, **values}.items() if name in known}
        made = core.MLATransformerConfig(
            **fields
            | {
                "num_moe_experts": read["num_experts"],
                "layernorm_epsilon": read["norm_epsilon"],
                "gated_linear_unit": True,
                "activation_func": torch.nn.functional.silu,
                "apply_rope_fusion": False,
            }
        )
    assert mismatches(read, made, release) == []
    made.num_moe_experts, made.layernorm_epsilon, made.gated_linear_unit = 4, 1e-5, False
    made.activation_func, made.kv_lora_rank = torch.nn.functional.gelu, 8
    said = " ".join(mismatches(read, made, release))
    for flag in (
        "--num-experts 8",
        "--norm-epsilon 1e-06",
        "--swiglu",
        "--swiglu alone",
        "--kv-lora-rank 24",
    ):
        assert flag in said


def test_dense_files_beside_a_model_with_indexers():
    dense, sparse = arguments("deepseek_v3"), arguments("deepseek_v32")
    assert mismatches(dense, job(dense | sparse, "0.16.1"), "0.16.1") == []
    assert adds_indexers(dense, job(sparse, "0.16.1"))
    assert not adds_indexers(sparse, job(sparse, "0.16.1"))
    assert not adds_indexers(dense, job(dense, "0.16.1"))
    assert remarks(dense, job(sparse, "0.16.1")) == [
        "the files are of a dense model: indexers are initialised, all else is read"
    ]


def test_what_is_left_out_and_what_stays_inexact_is_said():
    read = arguments("glm_moe_dsa", num_nextn_predict_layers=2, rms_norm_eps=1e-5)
    fewer, epsilon = remarks(read, job(read, "0.16.1", mtp_num_layers=1))
    assert "2 layers of multi-token prediction, and 1 are trained" in fewer
    assert "epsilon 1e-06, and Megatron, which has one for all norms, with 1e-05" in epsilon
    assert remarks(read | {"norm_epsilon": 1e-6}, job(read, "0.16.1")) == []
