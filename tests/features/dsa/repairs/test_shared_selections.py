"""Layers that share a selection are not recomputed, before anything is built."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import mindspeed_dsa
from mindspeed_dsa.features.dsa.repairs.feature import SHARED_SELECTIONS
from mindspeed_dsa.features.dsa.repairs.recompute import refuse_recompute
from mindspeed_dsa.patches.errors import SettingsError
from tests.support.contexts import context

SHARED = {"experimental_attention_variant": "dsa", "dsa_indexer_topk_freq": 4}
FULL = {"recompute_granularity": "full"}
SELECTIVE = {"recompute_granularity": "selective"}
CORE = {**SELECTIVE, "recompute_modules": ["moe_act", "core_attn"]}
EXPERTS = {"moe_fb_overlap": True, "overlap_moe_expert_parallel_comm": True}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (FULL, ["--recompute-granularity full"]),
        ({**FULL, "recompute_method": "uniform", "mtp_num_layers": 1}, ["--recompute-granularity full"]),
        ({**FULL, "recompute_in_advance": True}, ["--recompute-granularity full", "--recompute-in-advance"]),
        ({**CORE, "recompute_in_bubble": True}, ["--recompute-modules core_attn", "--recompute-in-bubble"]),
        (CORE, ["--recompute-modules core_attn"]),
        ({**SELECTIVE, "recompute_modules": None}, ["--recompute-modules core_attn"]),  # Megatron's default
        ({**CORE, **EXPERTS}, ["--recompute-modules core_attn"]),
    ],
)
def test_refused_by_name(arguments, named):
    (problem,) = SHARED_SELECTIONS.problems(SimpleNamespace(**SHARED, **arguments))
    for flag in ("--dsa-indexer-topk-freq 4", *named):
        assert flag in problem


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"recompute_granularity": None, "recompute_modules": ["core_attn"]},  # which have no effect
        {**SELECTIVE, "recompute_modules": ["layernorm", "moe_act", "mla_up_proj", "mlp", "moe"]},
        {**FULL, "dsa_indexer_topk_freq": 1},
        {**CORE, "dsa_indexer_topk_freq": None},
    ],
)
def test_what_runs_no_sharing_layer_again_is_served(arguments):
    assert SHARED_SELECTIONS.problems(SimpleNamespace(**{**SHARED, **arguments})) == []


def test_no_switch_turns_it_off():
    mindspeed_dsa.enable(experimental_attention_variant="dsa")
    with pytest.raises(SettingsError, match="dsa-shared-selections: --dsa-indexer-topk-freq 4 cannot"):
        mindspeed_dsa.validate(SimpleNamespace(**SHARED, **FULL))


def test_a_configuration_is_refused_before_it_is_complete():
    built = []
    post_init = refuse_recompute(built.append, context("dsa-shared-selections"))
    with pytest.raises(SettingsError, match="--dsa-indexer-topk-freq 4 cannot be used"):
        post_init(SimpleNamespace(**SHARED, **FULL))
    assert built == []
    for served in (SHARED, {**FULL, "experimental_attention_variant": None, "dsa_indexer_topk_freq": 4}):
        post_init(SimpleNamespace(**served))
    assert len(built) == 2
