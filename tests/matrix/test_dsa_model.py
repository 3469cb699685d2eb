"""Configuration fields of a DSA model on every release: precedence, refusals, and effect.

Runs on the release of the quick tests, too.
"""

from __future__ import annotations

import functools
import json
from argparse import Namespace

import pytest
import torch
from packaging.specifiers import SpecifierSet

from mindspeed_dsa.features.dsa.model.feature import FLAGS, fill_arguments, sets
from mindspeed_dsa.megatron.dsa import MODEL_SIZES, MODELS
from mindspeed_dsa.patches import versions
from tests.matrix import make_indexer_reference as of_0_19
from tests.matrix.make_reference import summary

pytestmark = pytest.mark.releases(">=0.12.1,<0.21", quick=True)

CASES = "tests.features.dsa.model.ways_to_configure"
NATIVE = str(versions.of_megatron()) in SpecifierSet(">=0.19", prereleases=True)
DEFAULTS = {flag.dest: flag.unset for flag in FLAGS}
DEFAULTS |= dict.fromkeys(("dsa_indexer_rope_first", "dsa_indexer_normalised_query"), NATIVE)
SHARING = {"dsa_indexer_topk_freq": 4, "dsa_indexer_skip_topk_offset": 3, "num_layers": 8}


def test_fields_have_the_defaults_of_0_19(pool):
    (result,) = pool.run(f"{CASES}:made", 1, switches={}, overrides={})
    assert result["made"] == result["copied"] == result["derived"] == result["other"] == DEFAULTS
    assert result["listed"] == [True, True]


def test_an_argument_a_setting_and_a_default(pool):
    switches = {"dsa_indexer_topk_freq": 2, "dsa_indexer_scoring_relu": False}
    overrides = {"dsa_indexer_k_norm_epsilon": 1e-6, "dsa_indexer_topk_freq": 2, "num_layers": 4}
    (result,) = pool.run(f"{CASES}:made", 1, switches=switches, overrides=overrides)
    expected = DEFAULTS | switches | {"dsa_indexer_k_norm_epsilon": 1e-6}
    assert result["made"] == result["copied"] == result["derived"] == expected
    assert result["other"] == DEFAULTS, "a model without DSA is not described by it"


def test_an_argument_that_contradicts_a_setting_is_refused(pool):
    (said,) = pool.run(f"{CASES}:refused", 1, switches={"dsa_indexer_topk_freq": 2}, overrides=SHARING)
    assert "dsa-model" in said
    assert "dsa_indexer_topk_freq=4 is passed to it, and 2 is chosen by API" in said
    (default,) = pool.run(
        f"{CASES}:refused",
        1,
        switches={"dsa_indexer_scoring_relu": False},
        overrides={"dsa_indexer_scoring_relu": True},
    )
    assert "dsa_indexer_scoring_relu=True is passed" in default


def test_all_problems_of_sharing_are_in_one_message(pool):
    overrides = {"dsa_indexer_topk_pattern": "SFX", "dsa_indexer_topk_freq": 2}
    (said,) = pool.run(f"{CASES}:refused", 1, switches={}, overrides=overrides)
    for part in ("layer 1 shares", "3 letters, and the model 2 layers", "X is no kind", "omit one of them"):
        assert part in said


def test_a_parser_has_every_flag(pool):
    line = (
        "--dsa-indexer-topk-freq 4 --dsa-indexer-skip-topk-offset 3 --dsa-indexer-rope-interleaved "
        "--no-dsa-indexer-rotate-activation --disable-dsa-indexer-scoring-relu --dsa-indexer-k-norm-epsilon "
        "1e-6 --dsa-indexer-k-norm-fp32 --dsa-indexer-rope-first --dsa-indexer-normalised-query "
        "--index-topk-pattern CSSS --index-share-for-mtp-iteration"
    )
    (values,) = pool.run(f"{CASES}:parsed", 1, line=line)
    assert list(values.values()) == [4, 3, "CSSS", True, True, True, True, False, False, 1e-6, True]
    negated = (
        "--no-dsa-indexer-rope-interleaved --dsa-indexer-rotate-activation --dsa-indexer-scoring-relu "
        "--no-dsa-indexer-k-norm-fp32 --no-dsa-indexer-rope-first --no-dsa-indexer-share-for-mtp"
    )
    (values,) = pool.run(f"{CASES}:parsed", 1, line=negated)
    assert {name: value for name, value in values.items() if value != DEFAULTS[name]} == (
        {"dsa_indexer_rope_first": False} if NATIVE else {}
    ) | ({"dsa_indexer_normalised_query": None} if values["dsa_indexer_normalised_query"] is None else {})


def test_an_order_that_the_indexer_does_not_have_is_refused(pool):
    switches = {"dsa_indexer_rope_first": False} if NATIVE else {"dsa_indexer_rope_interleaved": True}
    (said,) = pool.run(f"{CASES}:refused", 1, switches=switches, overrides={})
    assert ("--no-dsa-indexer-rope-first" if NATIVE else "add --dsa-indexer-rope-first") in said
    if NATIVE:
        (said,) = pool.run(
            f"{CASES}:refused", 1, switches={}, overrides={"dsa_indexer_normalised_query": False}
        )
        assert "always normalises the indexer's query" in said


@pytest.mark.parametrize("model", MODELS)
def test_a_models_name_sets_its_fields(pool, model):
    sizes = {"num_layers": 8, **dict.fromkeys(MODEL_SIZES[model])}
    (result,) = pool.run(f"{CASES}:made", 1, switches={"dsa_model": model}, overrides=sizes)
    expected = DEFAULTS | MODELS[model]
    assert result["made"] == result["copied"] == result["derived"] == expected
    assert result["other"] == DEFAULTS
    assert result["sizes"] == MODEL_SIZES[model]


def test_a_models_name_leaves_the_sizes_of_the_job(pool):
    overrides = {"num_layers": 8, "dsa_indexer_topk": 5}
    (result,) = pool.run(f"{CASES}:made", 1, switches={"dsa_model": "glm-5"}, overrides=overrides)
    assert result["sizes"]["dsa_indexer_topk"] == 5


@pytest.mark.parametrize("model", MODELS)
def test_a_models_name_fills_arguments(model):
    args = Namespace(experimental_attention_variant="dsa", dsa_model=model, dsa_indexer_topk=16, **DEFAULTS)
    (said,) = fill_arguments(args)
    assert said.startswith(f"--dsa-model {model} sets ")
    expected = DEFAULTS | MODELS[model] | MODEL_SIZES[model] | {"dsa_indexer_topk": 16}
    assert {name: vars(args)[name] for name in expected} == expected
    assert not fill_arguments(args), "called again it finds nothing left to do"
    assert not sets(model, {"dsa_indexer_topk_pattern": None}), "no pattern is nothing to say"


def test_what_contradicts_a_models_name_is_refused(pool):
    named = {"dsa_model": "glm-5.2"}
    run = functools.partial(pool.run, f"{CASES}:refused", 1)
    (setting,) = run(switches={**named, "dsa_indexer_topk_freq": 1}, overrides={})
    assert (
        "dsa_indexer_topk_freq=1) contradicts --dsa-model glm-5.2, which has dsa_indexer_topk_freq=4"
        in setting
    )
    assert "omit it, or omit --dsa-model" in setting
    (passed,) = run(switches=named, overrides={"dsa_indexer_scoring_relu": False, "num_layers": 8})
    assert "dsa_indexer_scoring_relu=False is passed" in passed
    assert "--dsa-model glm-5.2" in passed
    (pattern,) = run(switches={**named, "dsa_indexer_topk_pattern": "FS"}, overrides={})
    assert "contradicts --dsa-model glm-5.2, which has dsa_indexer_topk_pattern not given: omit it" in pattern
    (passed,) = run(switches=named, overrides={"dsa_indexer_topk_pattern": "FSFSFSFS", "num_layers": 8})
    assert "dsa_indexer_topk_pattern='FSFSFSFS' is passed to it, and no value is chosen" in passed


def test_a_models_name_trains_as_its_fields_do(pool):
    sizes: dict[str, object] = {"num_layers": 8}
    if str(versions.of_megatron()) not in SpecifierSet("<0.14"):
        sizes["transformer_impl"] = "local"
    step = functools.partial(pool.run, "tests.matrix.model:one_step", 1, num_microbatches=1)
    (named,) = step(switches={"use_fused_dsa": True, "dsa_model": "glm-5.2"}, overrides=sizes)
    (told,) = step(switches={"use_fused_dsa": True}, overrides={**sizes, **MODELS["glm-5.2"]})
    assert summary(named) == summary(told)


WAYS = {
    "Megatron's": {},
    "ours": {"use_fused_dsa": True},
    "Megatron's indexer": {"use_fused_dsa": True, "use_fused_lightning_indexer": False},
    "Megatron's loss": {"use_fused_dsa": True, "use_fused_lightning_indexer_kl_loss": False},
}


def computed(pool, name, way):
    """Compare a step with 0.19's own indexer."""
    expected = json.loads(of_0_19.FILE.read_text())["cases"][name]
    overrides = of_0_19.CASES[name]
    if str(versions.of_megatron()) not in SpecifierSet("<0.14"):
        overrides = {"transformer_impl": "local", **overrides}
    (step,) = pool.run(
        "tests.matrix.model:one_step", 1, switches=WAYS[way], overrides=overrides, num_microbatches=2
    )
    actual = summary(step)
    assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert actual["indexer loss"] == pytest.approx(expected["indexer loss"], rel=1e-5)
    assert actual["gradients"].keys() == expected["gradients"].keys()
    for parameter, (norm, product) in expected["gradients"].items():
        assert actual["gradients"][parameter] == pytest.approx([norm, product], abs=1e-4 * norm), parameter


@pytest.mark.parametrize("way", WAYS)
def test_without_relu_scores_are_those_of_0_19(pool, way):
    computed(pool, "without ReLU", way)


@pytest.mark.parametrize("way", ["Megatron's", "ours"])
@pytest.mark.parametrize("name", ["GLM", "GLM with heads of no power of two"])
def test_glms_indexer_is_that_of_0_19(pool, name, way):
    computed(pool, name, way)


@pytest.mark.releases(">=0.12.1,<0.21")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", of_0_19.CASES)
def test_every_option_computes_what_0_19_computes(pool, name, way):
    computed(pool, name, way)


@pytest.mark.releases(">=0.12.1,<0.21", quick=True)
def test_the_key_norm_in_fp32(pool):
    """Input and output are bf16, with no rounding in between."""
    (norm,) = pool.run(f"{CASES}:key_norm", 1)
    key, weight, bias = (norm[name].double() for name in ("key", "weight", "bias"))
    centred = key - key.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight + bias
    assert norm["out"].dtype == norm["key"].dtype
    assert (norm["out"].double() == expected.float().to(norm["key"].dtype).double()).double().mean() > 0.999
    assert norm["types"] == [torch.bfloat16, torch.float32]
