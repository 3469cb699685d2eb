"""Configs of Hugging Face models against transformers' classes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_dsa.features.checkpoints.hugging_face.architectures.registry import BY_TYPE
from mindspeed_dsa.features.checkpoints.hugging_face.config import (
    arguments_of,
    read_config,
)
from mindspeed_dsa.features.checkpoints.hugging_face.rotary import rotary_of, yarn_scale
from mindspeed_dsa.megatron.selections import Sharing
from mindspeed_dsa.patches.errors import SettingsError
from tests.features.checkpoints.hugging_face.models import (
    GROUPED,
    KINDS,
    WHERE,
    YARN,
    arguments,
    config,
)

transformers = pytest.importorskip("transformers", minversion="5.23")


@pytest.mark.parametrize("kind", [*KINDS, *GROUPED])
def test_what_a_file_leaves_out_is_what_transformers_takes(kind):
    """A config with only ``model_type`` gets the defaults of transformers' class."""
    # The class writes all its fields, with their defaults.
    whole = json.loads(getattr(transformers, {**KINDS, **GROUPED}[kind])().to_json_string())
    table = BY_TYPE[kind]
    computed = {name for name, usual in table.defaults.items() if usual is None}
    written = [name for name in (*table.defaults, *table.only) if name in whole.keys() - computed]
    assert {"rms_norm_eps", "max_position_embeddings", "hidden_act"} <= {*written}
    if kind in KINDS:
        assert {"n_group", "routed_scaling_factor", "norm_topk_prob"} <= {*written}
    assert {name: table.said({}, name) for name in written} == {name: whole[name] for name in written}
    # A file without the fields that have a default here must give the same arguments.
    theirs = {name: whole[name] for name in whole if name not in {*written, "rope_parameters"}}
    assert arguments_of(theirs, WHERE) == arguments_of(whole, WHERE)


def test_every_argument_of_a_model():
    found = arguments("glm_moe_dsa", index_topk_freq=3, index_skip_topk_offset=2, rms_norm_eps=1e-5)
    assert found == {
        "num_layers": 6,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 1000,
        "q_lora_rank": 40,
        "kv_lora_rank": 24,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 12,
        "qk_layernorm": True,
        "multi_latent_attention": True,
        "num_experts": 8,
        "moe_layer_freq": [0, 0, 1, 1, 1, 1],
        "moe_ffn_hidden_size": 32,
        "moe_shared_expert_intermediate_size": 64,
        "moe_router_topk": 4,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_dtype": "fp32",
        "mtp_num_layers": 1,
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": 3,
        "dsa_indexer_head_dim": 32,
        "dsa_indexer_topk": 16,
        "dsa_indexer_topk_freq": 3,
        "dsa_indexer_skip_topk_offset": 2,
        "dsa_indexer_topk_pattern": None,
        "dsa_indexer_rope_first": True,
        "dsa_indexer_rope_interleaved": True,
        "dsa_indexer_normalised_query": True,
        "dsa_indexer_rotate_activation": False,
        "dsa_indexer_scoring_relu": True,
        "dsa_indexer_k_norm_epsilon": 1e-6,
        "untie_embeddings_and_output_weights": True,
        "swiglu": True,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-5,
        "position_embedding_type": "rope",
        "max_position_embeddings": 202752,
        "rope_type": "rope",
        "rotary_base": 10000,
        "rotary_scaling_factor": 1.0,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def test_kinds_differ_in_their_indexers():
    assert arguments("deepseek_v3")["experimental_attention_variant"] is None
    assert not [name for name in arguments("deepseek_v3") if name.startswith("dsa_")]
    # The first kind, DeepSeek-V3, has no indexer.
    paired = {kind: arguments(kind)["dsa_indexer_rope_interleaved"] for kind in list(KINDS)[1:]}
    assert paired == {"deepseek_v32": False, "glm_moe_dsa": True}


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_freq": 2},
        {"index_topk_pattern": "FFSFSS"},
    ],
    ids=str,
)
def test_layers_that_select_keys_are_those_of_transformers(changed):
    file = config("glm_moe_dsa", **changed)
    sharing = Sharing.of(type("Args", (), arguments_of(file, WHERE)))
    ours = ["full" if sharing.computes(layer) else "shared" for layer in range(1, 7)]
    assert ours == file["indexer_types"]


@pytest.mark.parametrize("layers", [6, 10, 78])
@pytest.mark.parametrize("frequency", [2, 3, 4])
@pytest.mark.parametrize("offset", ["absent", None, 0, 1, 2, 3])
def test_offsets_are_those_of_transformers(layers, frequency, offset):
    """Null, which is a TypeError in transformers, means the default, as in SGLang."""
    file = {**config("glm_moe_dsa"), "num_hidden_layers": layers, "index_topk_freq": frequency}
    # Lists per layer would take precedence over frequency and offset.
    for name in ("indexer_types", "mlp_layer_types", "layer_types"):
        del file[name]
    there = file | ({"index_skip_topk_offset": offset} if isinstance(offset, int) else {})
    theirs = transformers.GlmMoeDsaConfig(**there).indexer_types
    file |= {} if offset == "absent" else {"index_skip_topk_offset": offset}
    # transformers lets the first layer share, although no layer before it selects.
    if theirs[0] == "shared":
        with pytest.raises(SettingsError, match="index_skip_topk_offset 0 layer 0 shares a selection"):
            arguments_of(file, WHERE)
        return
    sharing = Sharing.of(SimpleNamespace(**arguments_of(file, WHERE)))
    assert [("shared", "full")[sharing.computes(layer)] for layer in range(1, layers + 1)] == theirs


@pytest.mark.parametrize(
    ("changed", "pattern"),
    [
        ({"index_topk_pattern": "ffsfss"}, "FFSFSS"),
        ({"index_topk_pattern": "CCSCSS"}, "FFSFSS"),
        ({"index_topk_pattern": ["F", "F", "S", "F", "S", "S"]}, "FFSFSS"),
        ({"index_topk_pattern": ["full", "full", "shared", "full", "shared", "shared"]}, "FFSFSS"),
        ({"index_topk_pattern": "FFFFFF", "index_topk_freq": 2}, ""),
        ({"index_topk_freq": 4, "use_index_cache": False}, ""),
        ({"index_topk_pattern": "FFSFSS", "use_index_cache": False}, ""),
        ({"index_topk_pattern": "FFSFSS", "use_index_cache": True}, "FFSFSS"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_other_ways_to_write_a_pattern(kind, changed, pattern):
    # `indexer_types` would take precedence over the other fields.
    file = {name: value for name, value in config(kind).items() if name != "indexer_types"} | changed
    found = arguments_of(file, WHERE)
    sharing = Sharing.of(SimpleNamespace(**found))
    letters = "".join("SF"[sharing.computes(layer)] for layer in range(1, 7))
    assert letters == (pattern or "F" * 6)
    assert sharing.is_on == bool(pattern)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"index_topk_pattern": "FFXFSS"}, "index_topk_pattern is 'FFXFSS'; give"),
        ({"index_topk_pattern": "FFSFS"}, "index_topk_pattern is 'FFSFS'; give .* for each of 6 layers"),
        ({"index_topk_pattern": "SFSFSS"}, "with the pattern SFSFSS layer 0 shares a selection"),
        ({"use_index_cache": "no"}, "use_index_cache is 'no'"),
        (
            {"indexer_types": ["full"] * 5 + ["shared"], "use_index_cache": False},
            "use_index_cache is False, and indexer_types has shared layers",
        ),
    ],
    ids=str,
)
def test_patterns_that_say_nothing_are_refused(changed, problem):
    bare = {name: value for name, value in config("glm_moe_dsa").items() if name != "indexer_types"}
    with pytest.raises(SettingsError, match=problem):
        arguments_of(bare | changed, WHERE)


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_the_rotation_of_indexers_is_read(kind):
    usual = arguments(kind)["dsa_indexer_rope_interleaved"]
    for value, read in ((True, True), (False, False), (None, usual)):
        found = arguments_of({**config(kind), "indexer_rope_interleave": value}, WHERE)
        assert found["dsa_indexer_rope_interleaved"] is read


@pytest.mark.parametrize(
    "wrapped", [{"model_type": "deepseek_v32"}, {"model_type": "deepseek_v32_wrapper"}, {}]
)
def test_a_model_in_text_config_is_read(wrapped, tmp_path):
    """Some quantization tools write it so."""
    inner, quantised = config("deepseek_v32"), {"quantization_config": {"quant_method": "fp8"}}
    if "wrapper" not in str(wrapped):
        inner["model_type"] = "deepseek_v32_text" if wrapped else "deepseek_v32"
    (tmp_path / "config.json").write_text(json.dumps({**wrapped, **quantised, "text_config": inner}))
    read = read_config(tmp_path, "me")
    assert arguments_of(read, WHERE) == arguments("deepseek_v32")
    assert read["quantization_config"] == {"quant_method": "fp8"}
    # A model with images has a text model, too, and is refused.
    with_images = {"model_type": "kimi_k25", "vision_config": {}, "text_config": inner}
    (tmp_path / "config.json").write_text(json.dumps(with_images))
    with pytest.raises(SettingsError, match="model_type 'kimi_k25'"):
        arguments_of(read_config(tmp_path, "me"), WHERE)


def test_an_iterated_prediction_layer_shares_where_there_are_several():
    one = arguments("glm_moe_dsa", index_share_for_mtp_iteration=True)
    two = arguments("glm_moe_dsa", index_share_for_mtp_iteration=True, num_nextn_predict_layers=2)
    assert "dsa_indexer_share_for_mtp" not in one
    assert two["dsa_indexer_share_for_mtp"] is True


# -- rotary embeddings --------------------------------------------------------------------------

TABLE = BY_TYPE["deepseek_v32"]
# Older files name the rope type differently, and keep theta outside.
_OLD = {key: value for key, value in YARN.items() if key not in ("rope_type", "rope_theta")}


def _without_rope(file: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in file.items() if key != "rope_parameters"}


def test_older_files_have_rotary_embeddings_of_other_names():
    file = config("deepseek_v32", rope_parameters=dict(YARN))
    old = {**_without_rope(file), "rope_theta": 10000, "rope_scaling": {"type": "yarn", **_OLD}}
    assert rotary_of(old, TABLE) == rotary_of(file, TABLE)
    assert rotary_of(file, TABLE) == {
        "rotary_base": 10000,
        "rope_type": "yarn",
        "rotary_scaling_factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    plain = {**_without_rope(file), "rope_theta": 8000000, "rope_scaling": None}
    assert rotary_of(plain, TABLE) == {
        "rotary_base": 8000000,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
    }


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"mscale": 0.707, "mscale_all_dim": 1.0},
        {"mscale": None, "mscale_all_dim": None},
        {"mscale": 0.5, "mscale_all_dim": None},
        {"factor": None},
        {"beta_fast": None, "beta_slow": None},
    ],
    ids=str,
)
def test_frequencies_and_magnitudes_are_those_of_transformers(changed):
    """Megatron's YaRN frequencies and score factor equal the ones in transformers' model."""
    torch = pytest.importorskip("torch")
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as megatron
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    rope = {key: value for key, value in {**YARN, **changed}.items() if value is not None}
    rope.setdefault("factor", None)
    file = config("deepseek_v3", max_position_embeddings=65536, rope_parameters=rope)
    made = theirs.DeepseekV3Config(**file)
    frequencies, magnitude = theirs.ROPE_INIT_FUNCTIONS["yarn"](made)
    ours = rotary_of(file, TABLE)
    factor, length = ours["rotary_scaling_factor"], ours["original_max_position_embeddings"]
    # 8 is the rotary dimension.
    exponents = torch.arange(0, 8, 2, dtype=torch.float32) / 8
    whole = 1.0 / ours["rotary_base"] ** exponents
    low, high = megatron._yarn_find_correction_range(
        ours["beta_fast"], ours["beta_slow"], 8, ours["rotary_base"], length
    )
    kept = 1.0 - megatron._yarn_linear_ramp_mask(low, high, 4, device=torch.device("cpu"))
    torch.testing.assert_close(whole / factor * (1 - kept) + whole * kept, frequencies)
    scales = [megatron._yarn_get_mscale(factor, ours[name]) for name in ("mscale", "mscale_all_dim")]
    assert scales == [yarn_scale(factor, ours[name]) for name in ("mscale", "mscale_all_dim")]
    # Rotary embeddings are multiplied by the quotient of both scales.
    assert scales[0] / scales[1] == pytest.approx(magnitude)
    if rope["factor"]:  # transformers' attention does not derive the factor from the lengths
        assert scales[1] ** 2 == pytest.approx(theirs.yarn_apply_mscale(made.rope_parameters, 1.0))


# -- routing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"n_group": 1, "topk_group": 1},
        {"n_group": 4, "topk_group": 4},
        {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "routed_scaling_factor": 1.0},
        {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ],
    ids=str,
)
def test_experts_are_chosen_as_transformers_does(changed):
    torch = pytest.importorskip("torch")
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    file = config("deepseek_v3", **changed)
    ours = arguments_of(file, WHERE)
    router = DeepseekV3TopkRouter(transformers.DeepseekV3Config(**file))
    # A random bias, so that choice and weights have different scores.
    torch.manual_seed(1)
    bias = torch.randn(8)
    with torch.no_grad():
        router.weight.normal_()
        router.e_score_correction_bias.copy_(bias)
        logits, weights, indices = router(torch.randn(64, 64))
    expected = torch.zeros(64, 8).scatter(1, indices, weights)
    probs, _ = topk_routing_with_score_function(
        logits,
        ours["moe_router_topk"],
        num_groups=ours["moe_router_num_groups"],
        group_topk=ours["moe_router_group_topk"],
        scaling_factor=ours["moe_router_topk_scaling_factor"],
        score_function=ours["moe_router_score_function"],
        expert_bias=bias,
    )
    torch.testing.assert_close(probs, expected)


def test_a_window_that_no_layer_uses_is_ignored():
    file = config("qwen2") | {"sliding_window": 4096}
    assert arguments_of({**file, "use_sliding_window": None}, WHERE) == arguments("qwen2")


@pytest.mark.parametrize(
    ("changed", "layers"),
    [
        ({}, [1, 1, 1, 1, 1, 1]),
        ({"mlp_only_layers": [0, 4]}, [0, 1, 1, 1, 0, 1]),
        ({"decoder_sparse_step": 2}, [0, 1, 0, 1, 0, 1]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [0, 0, 0, 1, 0, 1]),
        ({"decoder_sparse_step": 9}, [0, 0, 0, 0, 0, 0]),
    ],
    ids=str,
)
def test_layers_with_experts_are_those_of_transformers(changed, layers):
    file = config("qwen3_moe", **changed)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**file))
    theirs = [int(type(layer.mlp).__name__ == "Qwen3MoeSparseMoeBlock") for layer in model.model.layers]
    assert arguments_of(file, WHERE)["moe_layer_freq"] == theirs == layers
    with pytest.raises(SettingsError, match="mlp_only_layers is 'all'"):
        arguments_of({**file, "mlp_only_layers": "all"}, WHERE)


@pytest.mark.parametrize(
    ("kind", "normalised"), [("qwen3_moe", True), ("qwen3_moe", False), ("mixtral", True)]
)
def test_softmax_chooses_experts_as_transformers_does(kind, normalised):
    torch = pytest.importorskip("torch")
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    file = config(kind, norm_topk_prob=normalised)
    ours = arguments_of(file, WHERE)
    router = {"qwen3_moe": Qwen3MoeTopKRouter, "mixtral": MixtralTopKRouter}[kind](
        getattr(transformers, GROUPED[kind])(**file)
    )
    torch.manual_seed(1)
    with torch.no_grad():
        router.weight.normal_()
        logits, weights, indices = router(torch.randn(64, 64))
    found, _ = topk_routing_with_score_function(
        logits,
        ours["moe_router_topk"],
        use_pre_softmax=ours["moe_router_pre_softmax"],
        scaling_factor=ours["moe_router_topk_scaling_factor"],
        score_function=ours["moe_router_score_function"],
    )
    torch.testing.assert_close(found, torch.zeros(64, 8).scatter(1, indices, weights))


def test_a_folder_or_its_file_is_read(tmp_path):
    file = tmp_path / "config.json"
    with pytest.raises(SettingsError, match=r"^mindspeed_dsa weights: .*config.json cannot be read"):
        read_config(tmp_path, "mindspeed_dsa weights")
    file.write_text("[1]")
    with pytest.raises(SettingsError, match="is no configuration of a model"):
        read_config(file, "mindspeed_dsa weights")
    transformers.GlmMoeDsaConfig().save_pretrained(tmp_path)
    assert read_config(tmp_path, "me")["model_type"] == "glm_moe_dsa"
    assert read_config(file, "me") == read_config(tmp_path, "me")


# Values that JSON or a careless script may put into any field.
