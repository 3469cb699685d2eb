"""Rewritten arguments of ``moe_tp_extend_ep``; ``tests/distributed`` tests that the layout trains the
same.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import mindspeed_dsa
from mindspeed_dsa import session
from mindspeed_dsa.features.moe.tp_extend_ep.feature import check_tp_extend_ep, extend
from mindspeed_dsa.megatron.job import validate_with_feature_checks
from tests.support import model

SIZES = ("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")


def arguments(tp=2, ep=1, etp=None, experts=8, world=None, pp=1):
    return SimpleNamespace(
        **dict(zip(SIZES, (tp, ep, etp), strict=True)),
        num_experts=experts,
        world_size=world,
        pipeline_model_parallel_size=pp,
    )


def sizes(args):
    return tuple(getattr(args, name) for name in SIZES)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 1, None), (2, 2, 1)),
        ((2, 4, None), (2, 8, 1)),
        ((1, 4, None), (1, 4, 1)),
        ((2, 4, 1), (2, 4, 1)),  # result of the first call, or a checkpoint's arguments
    ],
)
def test_experts_get_the_tensor_parallel_ranks_once(before, after):
    args = arguments(*before)
    said = extend(args)
    assert sizes(args) == after
    assert len(said) == (before[2] is None)
    assert extend(args) == ()
    assert sizes(args) == after
    assert list(check_tp_extend_ep(args)) == []


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"etp": 2}, "--expert-tensor-parallel-size 2 slices them; omit one of them"),
        ({"tp": 4, "ep": 3}, "8 experts cannot be spread evenly over 12 ranks"),
        ({"ep": 6, "etp": 1}, r"over 6 ranks \(--expert-model-parallel-size 6\)"),
        ({"ep": 1, "etp": 1}, "omit --expert-tensor-parallel-size, or set --expert-model-parallel-size 2"),
        ({"tp": 4, "ep": 2, "etp": 1}, "or set --expert-model-parallel-size 8"),
        ({"ep": 2, "world": 6}, "start a multiple of 4"),
        ({"ep": 2, "world": 12, "pp": 2}, "start a multiple of 8"),
        ({"experts": None}, "set --num-experts or omit the flag"),
    ],
)
def test_what_contradicts_it_is_left_alone_and_refused_in_one_message(given, problem):
    args = arguments(**given)
    before = sizes(args)
    with (
        mindspeed_dsa.enabled(moe_tp_extend_ep=True),
        pytest.raises(mindspeed_dsa.SettingsError, match=problem) as refusal,
    ):
        mindspeed_dsa.validate(args)
    assert sizes(args) == before
    assert str(refusal.value).count("--moe-tp-extend-ep") == 1


def test_megatrons_validation_sees_the_rewritten_layout(caplog):
    # Megatron's validation derives groups and checks divisibility from the arguments that it receives.
    running = session.Session(*session.resolve({"moe_tp_extend_ep": True}, []))
    seen = []

    def validate_args(args):
        seen.append(sizes(args))
        args.expert_tensor_parallel_size = args.expert_tensor_parallel_size or args.tensor_model_parallel_size

    args = arguments(ep=2)
    with caplog.at_level("INFO", logger="mindspeed_dsa"):
        validate_with_feature_checks(validate_args, running)(args)
    assert seen == [(2, 4, 1)]
    assert sizes(args) == (2, 4, 1)
    assert "tensor parallel 2 x expert parallel 2 becomes expert parallel 4" in caplog.text


def test_groups_that_nobody_rewrote_are_refused(pool):
    arguments = {"switches": {"moe_tp_extend_ep": True}, "tp": 2}
    case = "tests.features.moe.tp_extend_ep.test_tp_extend_ep:_finalize"
    assert (
        "slice experts over 2 ranks" in pool.run("tests.support.model:error_of", 2, case=case, **arguments)[0]
    )
    assert pool.run("tests.support.model:error_of", 2, case=case, etp=1, **arguments) == ["", ""]


def _finalize(**arguments):
    model.start(**arguments)
    mindspeed_dsa.finalize()
