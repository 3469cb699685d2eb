"""The generator of random jobs: that it tells right from wrong, and a few of its draws."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.combinations.draw import FEATURES, draws, fits
from tests.combinations.play import deviation, judged, play

STEPS = [
    {"step": step, "lm_loss": 5.5 - step / 10, "indexer_loss": 1e-3, "grad_norm": 3.0} for step in (1, 2)
]


def changed(name: str, factor: float) -> list[dict[str, float]]:
    return [STEPS[0], {**STEPS[1], name: STEPS[1][name] * factor}]


def test_equal_records_do_not_deviate():
    assert deviation(STEPS, STEPS, "fp32") == 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("grad_norm", 7 / 8),
        ("grad_norm", 0.49),
        ("indexer_loss", 0.5),
        ("lm_loss", 1.01),
        ("lm_loss", float("nan")),
    ],
)
def test_a_lost_microbatch_and_a_wrong_scale_deviate(dtype, name, factor):
    assert deviation(STEPS, changed(name, factor), dtype) > 1


def test_a_missing_step_and_a_missing_loss_deviate():
    assert deviation(STEPS, STEPS[:1], "fp32") > 1
    assert deviation([], [], "fp32") > 1
    assert deviation(STEPS, [STEPS[0], {**STEPS[1], "indexer_loss": None}], "fp32") > 1


@pytest.mark.parametrize(
    ("codes", "texts", "verdict"),
    [
        ([2, 2], ["pretrain_dsa.py: no such flag\n", ""], "refused"),
        ([2, 2], ["pretrain_dsa.py: no such flag\n", "pretrain_dsa.py: no such flag\n"], "traceback"),
        ([2, 2], ["", ""], "traceback"),
        ([2, 1], ["pretrain_dsa.py: no such flag\n", ""], "traceback"),
        ([1, 1], ["Traceback (most recent call last):\nKeyError: 'x'\n", ""], "traceback"),
        ([2, 2], ["pretrain_dsa.py: no such flag\nTraceback (most recent call last):\n", ""], "traceback"),
    ],
)
def test_only_one_message_and_no_traceback_is_a_refusal(codes, texts, verdict):
    assert judged(codes, texts).verdict == verdict


def test_one_seed_gives_one_list_without_a_flag_twice():
    found = draws(3, 40)
    assert found == draws(3, 40)
    assert found != draws(4, 40)
    for draw in found:
        words = [word for feature in draw.features for word in feature.split() if word.startswith("--")]
        assert len(words) == len(set(words))
        assert 2 <= len(draw.features) <= 5


def test_a_layout_is_given_what_can_act_there():
    assert fits("--use-ascend-coc --coc-parallel-num 2", "TP2+SP", "fp32", "")
    assert not fits("--use-ascend-coc --coc-parallel-num 2", "PP2", "fp32", "")
    assert not fits("--moe-fb-overlap", "EP2", "fp32", "--num-experts 0")
    assert fits("--reuse-fp32-param", "1", "bf16", "")
    assert not fits("--reuse-fp32-param", "1", "fp32", "")
    assert all(fits(feature, "1", "fp32", "") for feature, needed in FEATURES.items() if not needed)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", range(6))
def test_random_jobs_train_alike_or_are_refused(tmp_path: Path, number: int):
    draw = draws(19, 6)[number]
    outcome = play(draw, tmp_path / "jobs")
    assert outcome.verdict in ("same", "refused", "no job"), json.dumps([str(draw), outcome.detail])
