"""The generator of random jobs: its verdicts on right and wrong jobs, and a few of its draws."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.combinations.draw import FEATURES, Draw, draws, fits
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
    result = draws(3, 40)
    assert result == draws(3, 40)
    assert result != draws(4, 40)
    for draw in result:
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


@pytest.mark.parametrize(
    ("resumed", "model", "reference"),
    [
        ("EP2", "--hidden-dropout 0.1", "plain-resumed"),
        ("PP2", "--hidden-dropout 0.1", "features"),
        ("EP2", "", "features"),
    ],
)
@pytest.mark.parametrize("changes", ["plain", "features", "plain-resumed", "resumed"])
def test_what_is_continued_is_compared_with_what_has_the_same_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: str, model: str, reference: str, changes: str
):
    def job(argv: Sequence[str], ranks: int, output: Path, more: Sequence[str]) -> list[dict[str, float]]:
        if output.name.endswith("resumed"):
            run = "plain" if output.name.startswith("plain") else "features"
            assert more[:2] == ["--load", str(tmp_path / "draw" / run / "checkpoints")]
            assert output.name == "resumed" or "--recompute-norm" not in argv
        if f"{output.name}-resumed" == reference:
            assert "--no-save" not in more  # otherwise there is nothing to resume
        records = STEPS
        if output.name == changes:
            records = [{**record, "grad_norm": 2 * record["grad_norm"]} for record in STEPS]
        return [{**record, "step": record["step"] + 2} for record in records]

    monkeypatch.setattr("tests.combinations.play.train", job)
    outcome = play(Draw("PP2", resumed, "fp32", model, ("--recompute-norm",)), tmp_path / "draw")
    stage = "features" if changes in ("plain", "features") else "resumed"
    same = changes == "plain-resumed" and reference != changes
    assert (outcome.verdict, outcome.stage) == (("same", "resumed") if same else ("different", stage))


def test_with_dropout_the_jobs_deal_rows_alike():
    plain, masked = (
        Draw("CP2", "CP2", "fp32", model, ("--cp-block-rows 8", "--recompute-norm"))
        for model in ("", "--hidden-dropout 0.1")
    )
    assert "--cp-block-rows" not in plain.argv("CP2", features=False)
    assert "--cp-block-rows" in masked.argv("CP2", features=False)
    assert "--cp-block-rows" not in masked.argv("TP2+SP", features=False)
    assert "--recompute-norm" not in masked.argv("CP2", features=False)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", range(6))
def test_random_jobs_train_alike_or_are_refused(tmp_path: Path, number: int):
    draw = draws(19, 6)[number]
    outcome = play(draw, tmp_path / "jobs")
    assert outcome.verdict in ("same", "refused", "no job"), json.dumps([str(draw), outcome.detail])
