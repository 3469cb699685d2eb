"""Configs of Hugging Face models that are refused, each by the key that is wrong."""

from __future__ import annotations

import contextlib
import json

import pytest

from mindspeed_dsa.features.checkpoints.hugging_face.config import (
    arguments_of,
    read_config,
    read_model,
    sizes_of,
)
from mindspeed_dsa.patches.errors import SettingsError
from tests.features.checkpoints.hugging_face.models import (
    GROUPED,
    KINDS,
    LLAMA_3,
    WHERE,
    YARN,
    config,
)

transformers = pytest.importorskip("transformers", minversion="5.23")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"swiglu_limit": 10.0}, "swiglu_limit is 10.0"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"add_attention_sink": True}, "add_attention_sink is True"),
        (
            {"layer_types": ["indexed_attention", "sliding_attention"] * 3},
            "layer_types has ['sliding_attention']",
        ),
        ({"indexer_rope_interleave": 1}, "indexer_rope_interleave is 1, and it has True or False only"),
        ({"rope_interleave": False}, "rope_interleave is False"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"num_experts_per_tok": 1, "n_group": 1}, "norm_topk_prob is True"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ({"routed_scaling_factor": 0.0}, "routed_scaling_factor is 0"),
        ({"n_group": 3}, "n_group 3 does not divide n_routed_experts 8"),
        ({"n_group": 8, "topk_group": 4}, "num_experts_per_tok // topk_group = 1"),
        ({"n_group": "4"}, "n_group is '4', and a number is read"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, and a number is read"),
        ({"q_lora_rank": None}, "q_lora_rank is None"),
        ({"rope_parameters": {"full": {"rope_type": "default"}}}, "not one table"),
        ({"rope_parameters": {**YARN, "rope_type": "linear"}}, "rope_type is 'linear'"),
        ({"rope_parameters": {**YARN, "truncate": False}}, "truncate is False"),
        ({"rope_parameters": {**YARN, "attention_factor": 1.4}}, "attention_factor is 1.4"),
        ({"rope_parameters": {**YARN, "mscale": None}}, "mscale_all_dim is given without mscale"),
        ({"rope_parameters": {**YARN, "factor": "40"}}, "factor is '40', and a number is read"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_megatron_cannot_compute_is_refused(changed, problem):
    with pytest.raises(SettingsError) as caught:
        arguments_of({**config("deepseek_v32"), **changed}, WHERE)
    message = str(caught.value)
    assert message.startswith(f"{WHERE} is a model that Megatron cannot compute: ")
    assert problem in message


def test_all_problems_are_in_one_message():
    file = {
        **config("deepseek_v3"),
        "hidden_act": "gelu",
        "attention_bias": True,
        "rope_scaling": {"type": "su"},
    }
    with pytest.raises(SettingsError, match=r"hidden_act.*attention_bias.*rope_type is 'su'"):
        arguments_of(file, WHERE)


def test_a_kind_is_refused_by_name():
    with pytest.raises(
        SettingsError, match="model_type 'gpt2'; what can be read is deepseek_v3, kimi_k2, deepseek_v32"
    ):
        sizes_of({**config("deepseek_v3"), "model_type": "gpt2"}, WHERE)
    bare = {key: value for key, value in config("deepseek_v32").items() if key != "index_topk"}
    with pytest.raises(SettingsError, match="lacks index_topk"):
        sizes_of(bare, WHERE)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("deepseek_v4", "model_type 'deepseek_v4', with hyper-connections (hc_mult)"),
        ("hy_v4", "model_type 'hy_v4', with hyper-connections (hc_mult)"),
        ("qwen3_next", "model_type 'qwen3_next', with linear attention (linear_conv_kernel_dim)"),
    ],
)
def test_close_architectures_are_refused_by_what_is_not_served(name, part):
    file = json.loads(transformers.AutoConfig.for_model(name).to_json_string())
    with pytest.raises(SettingsError) as caught:
        arguments_of(file, WHERE)
    assert part in str(caught.value)
    assert "what can be read is deepseek_v3, kimi_k2" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "changed", "problem"),
    [
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("qwen3", {"attention_bias": True}, "attention_bias is True"),
        ("qwen2_moe", {"qkv_bias": False}, "qkv_bias is False"),
        ("llama", {"mlp_bias": True}, "mlp_bias is True"),
        ("llama", {"attention_bias": True}, "attention_bias is True"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 8"),
        ("mixtral", {"sliding_window": 4096}, "sliding_window is 4096"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1"),
        ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}, "num_experts_per_tok is 1"),
        ("qwen3_moe", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
        (
            "llama",
            {"rope_parameters": LLAMA_3 | {"factor": 32.0}},
            "factor is 32.0, and its --use-rope-scaling",
        ),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
    ids=str,
)
def test_what_grouped_queries_cannot_compute_is_refused(kind, changed, problem):
    with pytest.raises(SettingsError) as caught:
        arguments_of({**config(kind), **changed}, WHERE)
    assert str(caught.value).startswith(f"{WHERE} is a model that Megatron cannot compute: ")
    assert problem in str(caught.value)


@pytest.mark.parametrize("kind", ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "llama", "mixtral"])
def test_null_heads_of_keys_are_as_many_as_those_of_queries(kind):
    """A missing key is another number in most classes; some classes refuse null."""
    file = config(kind)
    assert arguments_of({**file, "num_key_value_heads": None}, WHERE)["num_query_groups"] == 8
    left_out = {key: value for key, value in file.items() if key != "num_key_value_heads"}
    usual = getattr(transformers, GROUPED[kind])().num_key_value_heads
    assert sizes_of(left_out, WHERE)["num_query_groups"] == (8 if kind == "llama" else usual)
    if kind in ("qwen2", "qwen3", "llama"):
        theirs = getattr(transformers, GROUPED[kind])(**{**file, "num_key_value_heads": None})
        assert theirs.num_key_value_heads == 8


ODD = ["three", "\ud800", [], [1], {}, {"a": 1}, True, -1, 1.5, float("nan"), float("inf"), None, 10**30]


@pytest.mark.parametrize("kind", [*KINDS, *GROUPED])
def test_fields_of_any_type_are_taken_or_refused_in_words(kind, tmp_path):
    """A field with a wrong type is a readable error, and a huge number does not allocate a huge list."""
    rope = YARN if kind in KINDS else LLAMA_3
    file = config(kind, rope_parameters=dict(rope)) | {"index_topk_freq": 1, "index_skip_topk_offset": 2}
    file |= {"index_topk_pattern": None, "rope_scaling": None, "quantization_config": None}
    for name in file:
        for value in ODD:
            odd = {**file, name: value}
            with contextlib.suppress(SettingsError):
                arguments_of(odd, WHERE)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"model.layers.6.x": "x"}}')
    for value in ODD:
        for name in ("num_hidden_layers", "num_nextn_predict_layers"):
            (tmp_path / "config.json").write_text(json.dumps({**file, name: value}))
            read_model(tmp_path, "me")


def test_files_of_nothing_but_brackets_are_refused_in_words(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(SettingsError, match="cannot be read"):
        read_config(tmp_path, "me")
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 1, "num_nextn_predict_layers": 1}')
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    assert read_model(tmp_path, "me")[1] == 0
