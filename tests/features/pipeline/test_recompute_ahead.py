"""Recomputation before the output gradient arrives is bit-identical to recomputation in place."""

from __future__ import annotations

import argparse
from typing import Any
from unittest import mock

import pytest

from mindspeed_dsa.features.pipeline.recompute_ahead.feature import check_recompute_ahead
from tests.support import model
from tests.support.contexts import running
from tests.support.model import losses_of

# -- functions that run in the pool's workers ------------------------------------------------------


def run(
    flag: str,
    layout: dict[str, int],
    recompute: dict[str, Any],
    frozen: str = "",
    trace: str = "",
    norms: bool = False,
    **arguments: Any,
) -> dict[str, Any]:
    """Return a step's result, and the numbers of recomputations ahead of the gradient and in place.

    Args:
        flag: switch to turn on; empty for none.
        layout: parallel sizes.
        recompute: Megatron's recompute settings.
        frozen: module of each chunk to freeze.
        trace: directory for a recorded step, which then runs in addition.
        norms: whether norm outputs are recomputed, too.
        **arguments: arguments of :func:`model.run`.
    """
    from mindspeed_dsa.features.pipeline.recompute_ahead.ahead import Ahead

    overrides = {**recompute, **arguments.pop("overrides", {})}
    build = model.gpt_model
    with mock.patch.object(
        model, "gpt_model", lambda *args, **more: model.freeze(build(*args, **more), frozen)
    ):
        switches: dict[str, Any] = {flag: True} if flag else {}
        if norms:
            switches["recompute_norm"] = True
        if trace:
            switches |= {"trace_schedule": trace, "trace_schedule_step": 1}
        result = model.run(switches, overrides=overrides, **arguments, **layout)
    context = running("recompute-ahead")
    return {**result, "recomputed": context.state(Ahead).recomputed if context else None}


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
DROPOUT = {"hidden_dropout": 0.1}

CASES = {
    # name: ranks, layout, layers, microbatches, recompute, recomputed ahead by rank (in bubbles, in advance).
    # Two layers per rank. The first rank waits for two gradients, its first one and its warmup's:
    # 2 gradients x 2 layers = 4.
    "PP2": (2, {"pp": 2}, 4, 4, {**FULL, **DROPOUT}, [(4, 0), (8, 0)]),
    # One layer per chunk, all recomputed. Rank 0 has 4 of 8 forwards in its warmup and waits for 5. Rank 1
    # has 2 and waits for 3; the gradients of its last chunk come from its own loss.
    "PP2 x VPP2": (2, {"pp": 2, "vpp": 2}, 4, 4, FULL, [(5, 2), (8, 4)]),
    "PP2 x TP2+SP": (4, {"pp": 2, "tp": 2}, 4, 3, FULL, [(4, 4, 0, 0), (6, 6, 0, 0)]),
    "PP2 x EP2, selective": (4, {"pp": 2, "ep": 2}, 4, 3, SELECTIVE, [(2, 2, 0, 0), (3, 3, 0, 0)]),
    # Recomputation of a norm's reader stays in place if the norm is recomputed too.
    "PP2, norms": (2, {"pp": 2}, 4, 4, SELECTIVE, [(0, 0), (0, 0)]),
    # The first rank's layers learn although their input needs no gradient.
    "PP2, frozen": (2, {"pp": 2}, 4, 4, FULL, [(4, 0), (8, 0)]),
    "PP2 x VPP2, block": (2, {"pp": 2, "vpp": 2}, 8, 4, BLOCK, [(5, 2), (8, 4)]),
}
QUICK = {"PP2 x EP2, selective"}
MARKED = [pytest.param(name, marks=pytest.mark.full) if name not in QUICK else name for name in CASES]


@pytest.mark.parametrize("name", MARKED)
def test_the_same_bits_at_other_times(pool, name, tmp_path):
    ranks, layout, layers, microbatches, recompute, expected = CASES[name]

    def run(flag):
        return pool.run(
            "tests.features.pipeline.test_recompute_ahead:run",
            ranks,
            flag=flag,
            layout=layout,
            recompute=recompute,
            norms="norms" in name,
            frozen="embedding" if "frozen" in name else "",
            trace=str(tmp_path / flag) if flag else "",
            overrides={"num_layers": layers},
            num_microbatches=microbatches,
            micro_batch_size=1,
        )

    stock = run("")
    for flag, ahead in zip(("recompute_in_bubble", "recompute_in_advance"), expected, strict=True):
        ours = run(flag)
        assert len(list((tmp_path / flag).iterdir())) == ranks
        assert tuple(rank["recomputed"]["ahead"] for rank in ours) == ahead, flag
        for mine, theirs in zip(ours, stock, strict=True):
            assert losses_of(mine) == losses_of(theirs)
            assert mine["gradients"].keys() == theirs["gradients"].keys()
            different = [
                key
                for key, gradient in theirs["gradients"].items()
                if not mine["gradients"][key].equal(gradient)
            ]
            assert different == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ()),
        ({"recompute_in_advance": True}, ("exclude each other",)),
        ({"pipeline_model_parallel_size": 1}, ("there is none",)),
        ({"recompute_granularity": None}, ("nothing to recompute",)),
        ({"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}, ("modules layernorm",)),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "moe"]},
            ("layernorm moe",),
        ),
        ({"recompute_granularity": "selective", "recompute_modules": ["layernorm", "core_attn"]}, ()),
        ({"recompute_granularity": "selective", "recompute_modules": ["moe_act", "moe"]}, ()),
        ({"distribute_saved_activations": True}, ("--distribute-saved-activations",)),
        ({"overlap_moe_expert_parallel_comm": True}, ("takes apart",)),
        ({"overlap_moe_expert_parallel_comm": True, "moe_fb_overlap": True}, ()),
        (
            {
                "moe_fb_overlap": True,
                "recompute_granularity": "selective",
                "recompute_modules": ["core_attn"],
            },
            ("add moe",),
        ),
        ({"fp8": "hybrid"}, ()),
    ],
)
def test_what_does_not_combine(given, words):
    values = {
        "recompute_in_bubble": True,
        "recompute_in_advance": False,
        "pipeline_model_parallel_size": 2,
        "recompute_granularity": "full",
        **given,
    }
    problems = list(check_recompute_ahead(argparse.Namespace(**values), None))
    assert len(problems) == len(words)
    for problem, word in zip(problems, words, strict=True):
        assert word in problem
