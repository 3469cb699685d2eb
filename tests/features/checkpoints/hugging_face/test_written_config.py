"""Written configs: transformers accepts them, and reads the same model from them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_dsa.features.checkpoints.hugging_face.config import arguments_of
from mindspeed_dsa.features.checkpoints.hugging_face.written_config import config_of
from mindspeed_dsa.patches.errors import SettingsError
from tests.features.checkpoints.hugging_face.models import (
    GROUPED,
    KINDS,
    LLAMA_3,
    WHERE,
    YARN,
    arguments,
    config,
    job,
)

transformers = pytest.importorskip("transformers", minversion="5.23")

WHO = "mindspeed_dsa weights"
RELEASES = ("0.12.1", "0.16.1", "0.19.0")
# Fields that Megatron's arguments do not have, or have in another form.
_SAID_BY_NOBODY = ("architectures", "dtype", "transformers_version", "rope_parameters")


def read_back(written: dict[str, Any], folder: Any) -> dict[str, Any]:
    """Return the config that transformers reads from a file."""
    (folder / "config.json").write_text(json.dumps(written))
    made = transformers.AutoConfig.from_pretrained(folder)
    assert type(made).__name__ == {**KINDS, **GROUPED}[written["model_type"]]
    return dict(json.loads(made.to_json_string(use_diff=False)))


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("deepseek_v3", {}),
        ("deepseek_v3", {"q_lora_rank": None, "n_shared_experts": 1, "num_nextn_predict_layers": 0}),
        ("deepseek_v32", {"rope_parameters": YARN, "max_position_embeddings": 163840}),
        ("deepseek_v32", {"tie_word_embeddings": True, "n_group": 1, "topk_group": 1}),
        ("deepseek_v32", {"mlp_layer_types": ["sparse", "dense", "sparse"] * 2, "first_k_dense_replace": 0}),
        ("glm_moe_dsa", {"rope_parameters": {"rope_type": "default", "rope_theta": 8000000.0}}),
        ("glm_moe_dsa", {"index_topk_freq": 2, "index_skip_topk_offset": 1, "num_nextn_predict_layers": 2}),
        ("glm_moe_dsa", {"index_topk_pattern": "FFSFSS", "rms_norm_eps": 1e-5}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 24}),
        ("qwen2_moe", {"mlp_only_layers": [0, 3]}),
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("llama", {"rope_parameters": LLAMA_3, "num_key_value_heads": 8}),
        ("mixtral", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}),
    ],
    ids=str,
)
def test_transformers_reads_the_same_model(kind, changed, release, tmp_path):
    if kind == "qwen2_moe" and release == "0.12.1":
        pytest.skip("this release has no gate of a shared expert")
    read, begun_with = arguments(kind, **changed), config(kind, **changed)
    tokens = {name: begun_with[name] for name in ("bos_token_id", "eos_token_id")}
    written = config_of(job(read, release), release, WHO, vocabulary=1000, tokens=tokens)
    again = arguments_of(written, WHERE)
    # 0.12.1 has one argument for both context lengths, so the longest context is lost.
    if release == "0.12.1":
        again.pop("max_position_embeddings"), read.pop("max_position_embeddings")
    assert again == read
    theirs = read_back(written, tmp_path)
    # Every field of the first file has to come back.
    same = {name: value for name, value in begun_with.items() if name not in _SAID_BY_NOBODY}
    same.pop("index_topk_pattern", None)
    if release == "0.12.1":
        same.pop("max_position_embeddings")
    assert {name: theirs.get(name) for name in same} == same
    rope = {name: theirs["rope_parameters"][name] for name in begun_with["rope_parameters"]}
    assert rope == begun_with["rope_parameters"]
    family = {**KINDS, **GROUPED}[kind].removesuffix("Config")
    assert theirs["architectures"] == [f"{family}ForCausalLM"]
    assert theirs["dtype"] == "bfloat16"


def test_a_repeated_layer_of_multi_token_prediction_is_one():
    trained = job(arguments("deepseek_v3", num_nextn_predict_layers=1), "0.19.0")
    trained.mtp_num_layers, trained.mtp_use_repeated_layer = 3, True
    assert config_of(trained, "0.19.0", WHO)["num_nextn_predict_layers"] == 1


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)),
    layers=st.integers(1, 12),
    dense=st.integers(0, 12),
    topk=st.integers(2, 8),
    shared=st.integers(0, 3),
    scale=st.floats(0.1, 10.0),
    factor=st.sampled_from([None, 1.0, 4.0, 40.0]),
    mscale=st.floats(0.1, 2.0),
    theta=st.integers(2, 10**8),
    epsilon=st.sampled_from([1e-6, 1e-5, 1e-8]),
    mtp=st.integers(0, 3),
    frequency=st.integers(1, 5),
    offset=st.integers(1, 12),
    tied=st.booleans(),
    release=st.sampled_from(RELEASES[1:]),
)
def test_any_model_comes_back(
    kind,
    layers,
    dense,
    topk,
    shared,
    scale,
    factor,
    mscale,
    theta,
    epsilon,
    mtp,
    frequency,
    offset,
    tied,
    release,
):
    changed = {
        "model_type": kind,
        "num_hidden_layers": layers,
        "first_k_dense_replace": min(dense, layers),
        "num_experts_per_tok": topk,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": shared,
        "routed_scaling_factor": scale,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(theta)},
        "rms_norm_eps": epsilon,
        "num_nextn_predict_layers": mtp,
        "tie_word_embeddings": tied,
    }
    if factor is not None:
        changed["rope_parameters"] = YARN | {"rope_theta": float(theta), "factor": factor, "mscale": mscale}
    if kind == "glm_moe_dsa":
        changed |= {"index_topk_freq": frequency, "index_skip_topk_offset": offset}
    file = {**_BARE[kind], **changed}
    read = arguments_of(file, WHERE)
    again = arguments_of(config_of(job(read, release), release, WHO, vocabulary=1000), WHERE)
    if factor == 1.0:  # a factor of 1 means plain rotary embeddings, without YaRN's numbers
        assert again["rope_type"] == "rope"
        kept = again.keys() - {"rope_type"}
        assert {name: again[name] for name in kept} == {name: read[name] for name in kept}
    else:
        if frequency == 1 or layers <= offset:  # all layers select under either rule
            for name in ("dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset"):
                again.pop(name, None), read.pop(name, None)
        assert again == read


_BARE = {
    kind: {
        name: value
        for name, value in config(kind).items()
        if name not in ("mlp_layer_types", "indexer_types", "layer_types")
    }
    for kind in KINDS
}
"""Files with no entries per layer."""


@pytest.mark.parametrize(
    ("kind", "here", "problem"),
    [
        ("deepseek_v32", {"dsa_indexer_rope_first": None}, "give --dsa-indexer-rope-first"),
        ("deepseek_v32", {"dsa_indexer_normalised_query": False}, "give --dsa-indexer-normalised-query"),
        ("glm_moe_dsa", {"dsa_indexer_k_norm_epsilon": 1e-5}, "give --dsa-indexer-k-norm-epsilon 1e-06"),
        ("glm_moe_dsa", {"dsa_indexer_scoring_relu": False}, "omit --no-dsa-indexer-scoring-relu"),
        (
            "deepseek_v3",
            {"moe_shared_expert_intermediate_size": 40},
            "--moe-shared-expert-intermediate-size 32",
        ),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq is ([1]*1+[0]*1"),
        ("deepseek_v3", {"moe_router_score_function": "softmax"}, "give --moe-router-score-function sigmoid"),
        ("deepseek_v3", {"moe_router_enable_expert_bias": False}, "give --moe-router-enable-expert-bias"),
        ("deepseek_v3", {"num_experts": None}, "give --num-experts"),
        ("deepseek_v3", {"swiglu": False}, "give --swiglu"),
        ("deepseek_v3", {"add_bias_linear": True}, "give --disable-bias-linear"),
        ("deepseek_v3", {"normalization": "LayerNorm"}, "give --normalization RMSNorm"),
        ("deepseek_v3", {"multi_latent_attention": False}, "as qwen3_moe would be another"),
        ("deepseek_v3", {"qk_layernorm": False}, "give --qk-layernorm"),
        ("deepseek_v3", {"add_qkv_bias": True}, "omit --add-qkv-bias"),
        ("deepseek_v3", {"moe_router_group_topk": 1}, "num_experts_per_tok // topk_group = 4"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_has_no_place_is_refused_with_its_flag(kind, here, problem):
    with pytest.raises(SettingsError) as caught:
        config_of(job(arguments(kind), "0.16.1", **here), "0.16.1", WHO)
    assert problem in str(caught.value)
    assert str(caught.value).startswith(WHO)


def test_a_release_that_scales_attention_otherwise_is_refused():
    found = arguments("deepseek_v3", rope_parameters=YARN)
    with pytest.raises(SettingsError, match="scales attention with --mscale for both"):
        config_of(job(found, "0.12.1", mscale=0.5), "0.12.1", WHO)


def test_arguments_that_say_nothing_are_refused():
    with pytest.raises(SettingsError, match="lack num_layers, hidden_size"):
        config_of(object(), "0.16.1", WHO)


def test_what_megatron_does_not_know_is_of_the_model_that_training_began_with(tmp_path):
    # Fields of the first file that no longer hold: its quantization, its code and its old names.
    like = {
        **config("deepseek_v32", rope_parameters=YARN, eos_token_id=[7, 9], max_position_embeddings=163840),
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "auto_map": {"AutoConfig": "configuration.Config"},
        "torch_dtype": "float16",
        "rope_scaling": {"type": "yarn", "factor": 2.0},
        "rope_theta": 5.0,
    }
    read = arguments("deepseek_v32", rope_parameters=YARN)
    written = config_of(job(read, "0.12.1"), "0.12.1", WHO, like=like, dtype="float32")
    assert not {"quantization_config", "auto_map"} & written.keys()
    assert written["rope_scaling"]["factor"] == 40.0, "another form of the trained model's"
    assert (written["torch_dtype"], written["rope_theta"]) == ("float32", 10000.0)
    theirs = read_back(written, tmp_path)
    assert theirs["eos_token_id"] == [7, 9]
    assert theirs["max_position_embeddings"] == 163840
    assert theirs["dtype"] == "float32"
    assert theirs["rope_parameters"]["factor"] == 40.0
    assert theirs["vocab_size"] == 1000
    # Without the real vocabulary, Megatron's padded size is written.
    assert config_of(job(read, "0.16.1", vocab_size=None), "0.16.1", WHO)["vocab_size"] == 1024


@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa"])
def test_a_job_that_does_not_state_its_attention_has_deepseeks(kind):
    """As the example job, whose loop sets it in the model's configuration."""
    trained = job(arguments(kind), "0.16.1")
    for name in ("multi_latent_attention", "qk_layernorm", "add_qkv_bias"):
        vars(trained).pop(name, None)
    assert config_of(trained, "0.16.1", WHO)["model_type"] == kind
