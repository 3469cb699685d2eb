"""Written configs as other programs read them: every key, for all architectures and options."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_dsa.features.checkpoints.hugging_face import companions
from mindspeed_dsa.features.checkpoints.hugging_face.config import arguments_of
from mindspeed_dsa.features.checkpoints.hugging_face.contract import KEYS, NEEDED, lacking
from mindspeed_dsa.features.checkpoints.hugging_face.written_config import TOKENS, config_of, notes
from mindspeed_dsa.megatron.selections import Sharing
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
KNOWN = {"bos_token_id": 77, "eos_token_id": 78}
"""Ids of special tokens in the job's tokenizer."""
PLAIN: dict[str, Any] = {}
OPTIONS = [
    PLAIN,
    {"rope_parameters": YARN},
    {"tie_word_embeddings": True, "num_nextn_predict_layers": 0},
    {"num_nextn_predict_layers": 2, "n_shared_experts": 1},
    {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
]
SHARED = [
    {"index_topk_freq": 2, "index_skip_topk_offset": 1},
    {"index_topk_freq": 3, "index_skip_topk_offset": 2},
    {"index_topk_freq": 4},
    {"index_topk_pattern": "FFSFSS"},
    {"index_topk_pattern": "FSSSSF", "num_nextn_predict_layers": 2, "index_share_for_mtp_iteration": True},
]
CASES = [(kind, changed) for kind in KINDS for changed in (OPTIONS + SHARED * (kind != "deepseek_v3"))]


def written(
    kind: str, changed: dict[str, Any], like: bool = False, without: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the config of a job that trains a model of transformers.

    Args:
        kind: ``model_type``.
        changed: fields of the model's config.
        like: whether the job started from the model.
        without: keys that the model's config lacks.
    """
    read = arguments(kind, **changed)
    reference = {key: value for key, value in config(kind, **changed).items() if key not in without}
    return config_of(
        job(read, "0.16.1"), "0.16.1", WHO, vocabulary=1000, like=reference if like else None, tokens=KNOWN
    )


@pytest.mark.parametrize("without", [None, (), *((key,) for key in TOKENS), TOKENS], ids=str)
@pytest.mark.parametrize(("kind", "changed"), CASES, ids=str)
def test_every_key_of_every_reader_is_written(
    kind: str, changed: dict[str, Any], without: tuple[str, ...] | None
) -> None:
    """Also where the model that training started from lacks ids of tokens, as most published ones do."""
    fields = written(kind, changed, like=without is not None, without=without or ())
    assert list(lacking(fields)) == []
    # Its own ids have priority over the tokenizer's.
    reference = {} if without is None else config(kind, **changed)
    for key in TOKENS:
        asked = key in reference and key not in (without or ())
        assert fields[key] == (reference[key] if asked else KNOWN.get(key)), key
    applying = [key for key in KEYS if not key.where or key.where in fields]
    assert {"scoring_func", "topk_method", "head_dim"} <= {key.name for key in applying}
    # Without this key, its readers are named.
    for key in applying:
        less = {name: value for name, value in fields.items() if name != key.name}
        said = list(lacking(less))
        if key.name not in {each.where for each in KEYS}:
            assert len(said) == 1, key.name
            assert all(reader in said[0] for reader in key.readers), key.name


@pytest.mark.parametrize(
    "key", [key for key in KEYS if "transformers" in key.readers], ids=lambda key: key.name
)
def test_defaults_of_the_table_are_those_of_transformers(key: Any) -> None:
    default = key.readers["transformers"]
    theirs = json.loads(transformers.DeepseekV3Config().to_json_string(use_diff=False))
    assert default == NEEDED or theirs.get(key.name) == default


@pytest.mark.parametrize("like", [False, True])
@pytest.mark.parametrize(("kind", "changed"), CASES, ids=str)
def test_values_are_those_of_the_model(kind: str, changed: dict[str, Any], like: bool) -> None:
    fields, theirs = written(kind, changed, like), config(kind, **changed)
    assert fields["scoring_func"] == "sigmoid"
    assert fields["topk_method"] == "noaux_tc"
    assert fields["moe_layer_freq"] == 1
    assert (fields["head_dim"], fields["qk_head_dim"]) == (theirs["head_dim"], theirs["qk_head_dim"])
    assert fields["torch_dtype"] == fields["dtype"] == "bfloat16"
    assert fields["rope_theta"] == fields["rope_parameters"]["rope_theta"]
    # Older readers take `rope_scaling` and `rope_theta`.
    older = dict(fields["rope_scaling"] or {"type": "default", "rope_type": "default"})
    assert older.pop("type") == older["rope_type"]
    assert {**older, "rope_theta": fields["rope_theta"]} == fields["rope_parameters"]
    if kind != "deepseek_v3":
        assert fields["indexer_rope_interleave"] is (kind == "glm_moe_dsa")


WITHOUT_EFFECT = set(
    """_name_or_path chunk_size_feed_forward id2label initializer_range is_encoder_decoder label2id
    output_attentions output_hidden_states output_router_logits pretraining_tp problem_type return_dict
    router_aux_loss_coef router_jitter_noise transformers_version use_cache""".split()
)
"""Fields of transformers' classes that change no logits of a trained model."""
DERIVED = {"layer_types", "max_window_layers", "num_local_experts", "sliding_window"}
"""Fields with one value here, which the class derives: no windows, and another name of ``num_experts``."""


@pytest.mark.parametrize("like", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, *GROUPED])
def test_every_field_of_transformers_class_is_written(kind: str, like: bool) -> None:
    fields, model_class = written(kind, {}, like), getattr(transformers, {**KINDS, **GROUPED}[kind])
    theirs = json.loads(model_class().to_json_string(use_diff=False)).keys()
    assert theirs - fields.keys() <= WITHOUT_EFFECT | DERIVED
    # Without the derived ones, the class has the values of the model that was trained.
    trained, read = model_class(**config(kind)), model_class(**fields)
    for name in DERIVED & theirs:
        assert getattr(read, name) == getattr(trained, name), name


@pytest.mark.parametrize("like", [False, True])
@pytest.mark.parametrize("kind", GROUPED)
def test_keys_of_grouped_queries(kind: str, like: bool) -> None:
    changed = {"rope_parameters": LLAMA_3} if kind == "llama" else {}
    fields = written(kind, changed, like)
    assert (fields["num_key_value_heads"], fields["head_dim"]) == (2, 16)
    assert {"kv_lora_rank", "n_group", "num_nextn_predict_layers"}.isdisjoint(fields)
    if kind == "llama":
        theta = fields["rope_theta"]
        assert {**fields["rope_scaling"], "rope_theta": theta} == {**LLAMA_3, "type": "llama3"}
    if kind in ("qwen2_moe", "qwen3_moe"):
        assert (fields["norm_topk_prob"], fields["mlp_only_layers"], fields["num_experts"]) == (False, [], 8)


def skipped(found: dict[str, Any]) -> dict[str, list[bool]]:
    """Return the layers that share keys, as each program reads the config."""
    layers = range(found["num_hidden_layers"])
    pattern, frequency = found.get("index_topk_pattern"), found.get("index_topk_freq", 1)
    offset = found.get("index_skip_topk_offset")
    by_offset = {
        # vLLM and transformers take 2 where the offset is missing, SGLang means the same, xLLM takes 0.
        "vLLM": [max(layer - (2 if offset is None else offset) + 1, 0) % frequency != 0 for layer in layers],
        "xLLM": [max(layer - (offset or 0) + 1, 0) % frequency != 0 for layer in layers],
    }
    read = {}
    for reader, rule in by_offset.items():
        read[reader] = rule if pattern is None else [pattern[layer] == "S" for layer in layers]
    if not found.get("use_index_cache", False):
        read["vLLM's DeepSeek-V3.2"] = [False for _ in layers]
    if "indexer_types" in found:
        theirs = transformers.GlmMoeDsaConfig(**found)
        read["transformers"] = [kind == "shared" for kind in theirs.indexer_types]
    return read


@pytest.mark.parametrize("like", [False, True])
@pytest.mark.parametrize(("kind", "changed"), [case for case in CASES if case[0] != "deepseek_v3"], ids=str)
def test_all_readers_see_the_same_layers_share(kind: str, changed: dict[str, Any], like: bool) -> None:
    sharing = Sharing.of(SimpleNamespace(**arguments(kind, **changed)))
    ours = [not sharing.computes(layer) for layer in range(1, 7)]
    fields = written(kind, changed, like)
    assert any(ours) == ("index_topk_pattern" in fields) == fields.get("use_index_cache", False)
    if any(ours):
        assert ("index_topk_freq" in fields) == (not sharing.pattern)
    for reader, theirs in skipped(fields).items():
        # xLLM takes another offset than the others without a pattern.
        if reader != "xLLM" or "index_topk_pattern" in fields:
            assert theirs == ours, reader
    assert arguments_of(fields, WHERE) == arguments(kind, **changed)


def test_a_model_that_no_longer_shares_loses_all_keys_of_sharing() -> None:
    like = config("deepseek_v32", index_topk_freq=2) | {
        "use_index_cache": True,
        "index_topk_pattern": "FFSFSF",
    }
    found = config_of(job(arguments("deepseek_v32"), "0.16.1"), "0.16.1", WHO, vocabulary=1000, like=like)
    assert not {"use_index_cache", "index_topk_pattern", "index_topk_freq"} & found.keys()


def test_an_iteration_that_megatron_does_not_have_stays_with_the_model() -> None:
    """GLM-5.2 iterates its one layer of multi-token prediction over one selection."""
    read, name = arguments("glm_moe_dsa"), "index_share_for_mtp_iteration"
    like = config("glm_moe_dsa") | {name: True}
    assert config_of(job(read, "0.16.1"), "0.16.1", WHO, vocabulary=1000, like=like)[name] is True
    # Two layers of multi-token prediction need no iteration.
    two = arguments("glm_moe_dsa", num_nextn_predict_layers=2)
    assert name not in config_of(job(two, "0.16.1"), "0.16.1", WHO, vocabulary=1000, like=like)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize("shared", [{}, {"index_topk_pattern": "FFSFSS"}], ids=str)
def test_the_class_rotates_as_the_key_says(kind: str, shared: Any, interleaved: bool) -> None:
    """transformers decides by the class, and engines by the key."""
    read = arguments_of({**config(kind, **shared), "indexer_rope_interleave": interleaved}, WHERE)
    found = config_of(job(read, "0.16.1"), "0.16.1", WHO, vocabulary=1000)
    assert found["model_type"] == ("glm_moe_dsa" if interleaved else "deepseek_v32")
    assert found["indexer_rope_interleave"] is interleaved
    again = arguments_of(found, WHERE)
    assert {**again, "dsa_indexer_rotate_activation": None} == {**read, "dsa_indexer_rotate_activation": None}


# -- the model that training began with, and the tokenizer -----------------------------------------


def test_unknown_keys_are_kept_and_contradicted_ones_named() -> None:
    like = config("deepseek_v32") | {"aux_loss_alpha": 0.001, "num_nextn_predict_layers": 3}
    trained = job(arguments("deepseek_v32"), "0.16.1", max_position_embeddings=2**20)
    fields = config_of(trained, "0.16.1", WHO, vocabulary=1000, like=like)
    assert fields["aux_loss_alpha"] == 0.001
    assert notes(fields, like, trained) == [
        "config.json has num_nextn_predict_layers 1, and the model that it is like 3",
        "config.json keeps max_position_embeddings 163840, and the job has 1048576",
    ]
    assert (
        notes(fields | {"num_nextn_predict_layers": 3}, like, job(arguments("deepseek_v32"), "0.16.1")) == []
    )


def test_rows_of_a_tied_embedding_beyond_its_padding_are_named() -> None:
    like = config("deepseek_v32") | {"tie_word_embeddings": True}
    sizes = {"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": 64}
    for padded, said in ((1024, False), (1152, True)):
        trained = job(arguments("deepseek_v32"), "0.16.1", padded_vocab_size=padded, **sizes)
        told = " ".join(notes({**like, "vocab_size": 1000}, like, trained))
        assert ("152 rows of the embedding are taken for padding" in told) == said
        assert ("taken for padding" in told) == said


def test_a_tokenizer_and_layers_that_readers_may_take_for_others_are_named() -> None:
    like = config("deepseek_v32") | {"eos_token_id": [3, 4], "bos_token_id": 0}
    trained = job(arguments("deepseek_v32"), "0.16.1", tokenizer_model="/chat")
    fields = config_of(trained, "0.16.1", WHO, vocabulary=1000, like=like)
    assert notes(fields, like, trained, {"eos_token_id": 3, "bos_token_id": 0}) == []
    (said,) = notes(fields, like, trained, {"eos_token_id": 7, "bos_token_id": 0})
    assert "the job's tokenizer has eos_token_id 7, and" in said
    assert said.endswith("take them from /chat")
    mixed = fields | {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}
    (said,) = notes(mixed, {}, trained)
    assert "a reader of first_k_dense_replace alone builds another model" in said


def save(folder: Path, **files: Any) -> str:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder)


ADDED = [{"id": 7, "content": "<s>"}, {"id": 9, "content": "</s>"}, {"id": 8, "content": "<pad>"}]
WORDS = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"config": {"eos_token_id": [3, 4], "pad_token_id": 3, "bos_token_id": None}}, (None, [3, 4], 3)),
        ({"tokenizer_config": WORDS, "tokenizer": {"added_tokens": ADDED}}, (7, 9, None)),
        (
            {"tokenizer_config": WORDS | {"added_tokens_decoder": {"5": {"content": "<s>"}, "x": 1}}},
            (5, None, None),
        ),
        ({"tokenizer_config": WORDS, "added_tokens": {"<s>": 6}}, (6, None, None)),
        ({"tokenizer_config": WORDS}, (None, None, None)),
        ({"tokenizer_config": "[", "tokenizer": "[]"}, (None, None, None)),
        ({"config": {"eos_token_id": "two", "bos_token_id": True}}, (None, None, None)),
    ],
    ids=lambda value: str(list(value)),
)
def test_ids_of_special_tokens_are_the_tokenizers(files: Any, ids: Any, tmp_path: Path) -> None:
    folder = save(tmp_path / "tokenizer", **files)
    tokens = companions.token_ids(folder)
    fields = config_of(job(arguments("glm_moe_dsa"), "0.16.1"), "0.16.1", WHO, tokens=tokens)
    assert tuple(fields[name] for name in TOKENS) == ids
    (tmp_path / "config.json").write_text(json.dumps(fields))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert tuple(getattr(theirs, name) for name in TOKENS) == ids
    assert bool(notes(fields, None, None)) == (ids == (None, None, None))


def test_a_tokenizer_may_be_a_file_or_unknown(tmp_path: Path) -> None:
    folder = save(tmp_path / "tokenizer", tokenizer={"added_tokens": ADDED}, tokenizer_config=WORDS)
    assert companions.token_ids(f"{folder}/tokenizer.json") == {"bos_token_id": 7, "eos_token_id": 9}
    for unknown in (None, "", "deepseek-ai/DeepSeek-V3", str(tmp_path / "none")):
        assert companions.token_ids(unknown) == {}
