"""Loading refuses files that lack tensors of the model, also if no arguments were checked before.

Otherwise a training loop that builds its model in an unknown way would train from random weights.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_dsa import log, session, weights
from mindspeed_dsa.features.checkpoints.hugging_face import contradictions, loading, mismatch
from mindspeed_dsa.features.checkpoints.hugging_face.architectures.registry import BY_TYPE
from mindspeed_dsa.features.checkpoints.hugging_face.feature import check_load
from mindspeed_dsa.features.checkpoints.hugging_face.names import Shape
from mindspeed_dsa.runs.files import RunError
from mindspeed_dsa.runs.whole_checkpoints import TRACKER
from mindspeed_dsa.session import checks

JOB = SimpleNamespace(
    num_layers=3,
    num_experts=2,
    moe_layer_freq=[0, 1, 1],
    q_lora_rank=8,
    moe_shared_expert_intermediate_size=16,
    experimental_attention_variant="dsa",
    dsa_indexer_rope_first=True,
    dsa_indexer_normalised_query=True,
)
KIND = {
    "model_type": "deepseek_v32",
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "q_lora_rank": 8,
    "index_topk": 4,
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"), 2),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 2),
    **dict.fromkeys(("num_experts_per_tok", "index_n_heads", "index_head_dim"), 2),
}
SHAPE = Shape.of(JOB, BY_TYPE["deepseek_v32"])


def size_of(name: str) -> list[int]:
    """Return the size of a weight that ``KIND`` states, with 1 where it states none."""
    kind = contradictions._EXPERT.sub("{expert}", contradictions._LAYER.sub("", name))
    keys = BY_TYPE["deepseek_v32"].shapes.get(kind, ())
    return [contradictions._size(KIND, key) or 1 for key in keys] or [1]


def write(folder: Path, *without: str) -> None:
    """Write a model's files without the tensors whose names contain one of these parts."""
    names = [name for place in SHAPE.places() for name in SHAPE.names(place)]
    kept = [name for name in names if not any(part in name for part in without)]
    save_file({name: torch.zeros(size_of(name)) for name in kept}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(KIND))


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("layers.1.self_attn.o_proj", "the files lack model.layers.1.self_attn.o_proj.weight"),
        ("layers.2.self_attn.indexer.", "the files lack the indexers of layers 3"),
        ("layers.2.self_attn.indexer.wk.", "the files lack the indexers of layers 3"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, part: str, said: str) -> None:
    write(tmp_path, part)
    with pytest.raises(RunError, match=said):
        loading.load([], tmp_path, JOB, log.get())


def with_a_layer_more(folder: Path, config: dict[str, int]) -> None:
    """Write the files of a model with one layer more than the job's."""
    write(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name.replace(".2.", ".3."): each.clone() for name, each in tensors.items() if ".2." in name}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(KIND | config))


def test_more_layers_than_the_model_has_are_refused(tmp_path: Path) -> None:
    # Only the config can say that the layer after the last one is for multi-token prediction.
    for config, said in (
        ({}, "the files have layers 3, .* num_hidden_layers in config.json would be 4"),
        ({"num_hidden_layers": 4}, "num_layers is 3 here and 4 in the files"),
    ):
        with_a_layer_more(tmp_path, config)
        with pytest.raises(RunError, match=said):
            loading.load([], tmp_path, JOB, log.get())
    with_a_layer_more(tmp_path, {"num_nextn_predict_layers": 1})
    weights.load([], tmp_path, JOB)  # uses the package's logger


def test_files_that_contradict_their_config_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(KIND | {"hidden_size": 4, "kv_lora_rank": 3}))
    with pytest.raises(RunError, match=r"and in config.json (hidden_size is 4|kv_lora_rank is 3) "):
        loading.load([], tmp_path, JOB, log.get())


@pytest.mark.parametrize("copy", ["embed_tokens", "shared_head.head"])
def test_a_copy_in_a_prediction_layer_must_be_the_models(tmp_path: Path, copy: str) -> None:
    job = SimpleNamespace(**vars(JOB), mtp_num_layers=1)
    shape = Shape.of(job, BY_TYPE["deepseek_v32"])
    names = [name for place in shape.places() for name in shape.names(place)]
    tensors = {name: torch.zeros(size_of(name)) for name in names}
    tensors |= {copy: tensors[original].clone() for copy, original in shape.repeated()}
    (tmp_path / "config.json").write_text(json.dumps(KIND | {"num_nextn_predict_layers": 1}))
    save_file(tensors, tmp_path / "model.safetensors")
    loading.load([], tmp_path, job, log.get())
    tensors[f"model.layers.3.{copy}.weight"][1] = 1.0
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RunError, match=rf"model.layers.3.{copy}.weight differs from (model.embed_|lm_head)"):
        loading.load([], tmp_path, job, log.get())
    loading.load([], tmp_path, JOB, log.get())  # the job leaves the layer out


def test_indexers_of_layers_that_share_are_left_out_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    loading.load([], tmp_path, JOB, log.get())
    assert "share a selection" not in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(KIND | {"index_topk_pattern": "FSF"}))
    loading.load([], tmp_path, SimpleNamespace(**vars(JOB), dsa_indexer_topk_pattern="CSC"), log.get())
    assert "the files have indexers in layers 2, which share a selection" in capsys.readouterr().err


def test_only_a_dense_models_files_may_lack_all_indexers(tmp_path: Path) -> None:
    write(tmp_path, ".indexer.")
    with pytest.raises(RunError, match="the files lack the indexers of layers 1"):
        loading.load([], tmp_path, JOB, log.get())
    dense = {key: value for key, value in KIND.items() if not key.startswith("index_")}
    (tmp_path / "config.json").write_text(json.dumps(dense | {"model_type": "deepseek_v3"}))
    loading.load([], tmp_path, JOB, log.get())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rotary_base": 5e5}, "rotary_base is 500000 here and 10000"),
        ({"moe_router_topk": 1}, "moe_router_topk is 1"),
    ],
)
def test_a_loop_of_ones_own_loads_no_other_model(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    write(tmp_path)
    with pytest.raises(RunError, match=said):
        weights.load([], tmp_path, SimpleNamespace(**vars(JOB), **changed))


@pytest.mark.parametrize("built", [True, False])
def test_a_model_that_nobody_has_filled_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: bool
) -> None:
    once, job = SimpleNamespace(done=False), SimpleNamespace(load=str(tmp_path))
    (tmp_path / TRACKER).write_text("5")
    context = SimpleNamespace(
        state=lambda _: once,
        megatron=lambda _: SimpleNamespace(get_args=lambda: job),
        options=SimpleNamespace(folder=tmp_path),
        log=log.get(),
    )
    monkeypatch.setattr(loading, "show_without_traceback", lambda: None)
    build = loading.fill_model(lambda: ["model"], context) if built else lambda: ["model"]
    setup = loading.require_weights(build, context)
    if built:
        assert setup() == ["model"], "its checkpoint is read later"
        (tmp_path / TRACKER).unlink()
        filled = []
        monkeypatch.setattr(loading, "load", lambda chunks, *_: filled.append(chunks))
        assert setup() == ["model"], "--inprocess-restart, before the first checkpoint"
        assert filled == [["model"]]
    else:
        with pytest.raises(RunError, match="weights import, and name the checkpoint in --load"):
            setup()


@pytest.mark.parametrize("switch", ["load_hf", "save_hf", "whole_checkpoints"])
def test_a_loop_of_ones_own_is_told_that_nothing_would_happen(pool, tmp_path: Path, switch: str) -> None:
    """Bridge and verl have other loops than Megatron-LM; load-hf alone would train random weights."""
    value = True if switch == "whole_checkpoints" else str(tmp_path)
    case = {"case": "tests.support.model:run", "switches": {switch: value}}
    (error,) = pool.run("tests.support.model:error_of", 1, **case)
    assert f"{switch.replace('_', '-')} (switched on by" in error
    assert "works in Megatron-LM's own loop (megatron.training), which this job has not imported" in error


def test_a_loop_that_reads_our_variables_serves_them_itself(tmp_path: Path) -> None:
    with mock.patch.dict(os.environ, MINDSPEED_DSA_LOAD_HF=str(tmp_path)):
        settings, active = session.resolve({}, [])
    assert "load-hf" in [feature.name for feature in active]
    assert "megatron.training" not in sys.modules
    assert not checks.outside_training_loop(active, settings)


def test_weights_stored_in_fp8_are_refused():
    """Megatron takes the master weights of such weights from their initialization."""
    job = SimpleNamespace(fp8="e4m3", fp8_param_gather=True)
    options = SimpleNamespace(folder="m", release=None)
    with mock.patch.object(mismatch, "problems", return_value=[]):
        (problem,) = check_load(job, options)
    assert "--load-hf m does not combine with --fp8-param-gather" in problem
