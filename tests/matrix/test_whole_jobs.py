"""Jobs of Megatron-LM's own pretrain_gpt.py from the first step to a resume, with evaluation and save.

Covers each stage and each model of DSA, and our own schedules. Of ten steps, the last five run again.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.matrix.record import Note
from tests.matrix.test_pretrain_gpt import LAYOUT, RECIPE, checkout, job, pretrain
from tests.matrix.test_weights_in_training import CHECKPOINTS

pytestmark = [
    pytest.mark.releases(">=0.12.1"),
    pytest.mark.timeout(1100),
    pytest.mark.skipif(checkout() is None, reason="MEGATRON_LM names no checkout of the installed release"),
]

STEPS, HALF = 10, 5
FIGURES = ("lm_loss", "indexer_loss", "grad_norm")
STAGES = ("dense", "warmup", "sparse", "frozen")
LEARN = ("warmup", "sparse")
"""Stages with an indexer loss."""
MODELS = ("deepseek-v3.2", "glm-5", "glm-5.2")
FUSED = "--use-fused-dsa"
V = "--pipeline-model-parallel-size 2 --micro-batch-size 1"
UNTIED = "--untie-embeddings-and-output-weights"
PREDICTED = re.compile(r"mtp_1 loss: (\S+)")
"""Loss of multi-token prediction in Megatron's line about a step."""


def ten_steps(folder: Path, flags: str, layout: str = LAYOUT) -> dict[str, Any]:
    """Train, evaluate and save every five steps; then repeat the second half from the first save."""
    saved = folder / "checkpoints"
    way = "torch_dist" if CHECKPOINTS else "torch"
    flags = f"{flags} --ckpt-format {way} --save {saved} --save-interval {HALF}"
    unbroken = pretrain(folder / "unbroken", flags, layout, steps=STEPS, interval=HALF)
    shutil.rmtree(saved / f"iter_{STEPS:07d}")
    (saved / "latest_checkpointed_iteration.txt").write_text(str(HALF), encoding="utf-8")
    resumed = pretrain(folder / "resumed", f"{flags} --load {saved}", layout, steps=STEPS, interval=HALF)
    assert [record["step"] for record in unbroken["steps"]] == list(range(1, STEPS + 1))
    assert [record["step"] for record in resumed["steps"]] == list(range(HALF + 1, STEPS + 1))
    for mine, theirs in zip(resumed["steps"], unbroken["steps"][HALF:], strict=True):
        figures = [figure for figure in FIGURES if theirs[figure] is not None]  # some stages have no loss
        assert [mine[figure] for figure in figures] == pytest.approx(
            [theirs[figure] for figure in figures], 1e-5
        )
    assert set(unbroken["evaluations"]) == {HALF, STEPS}
    assert set(resumed["evaluations"]) == {STEPS}
    assert resumed["evaluations"][STEPS] == pytest.approx(unbroken["evaluations"][STEPS], rel=1e-5)
    return unbroken


@pytest.mark.parametrize("fused", ["", pytest.param(FUSED, marks=pytest.mark.full)], ids=["", "fused"])
@pytest.mark.parametrize("stage", STAGES)
def test_each_stage(note: Note, tmp_path: Path, stage: str, fused: str) -> None:
    name = "dsa-stage" if stage != "sparse" else "dsa-stage-checkpoints"
    note.begins("pretrain_gpt.py, TP2+SP", name)
    trained = ten_steps(tmp_path, f"--dsa-stage {stage} {fused}")
    first, last = trained["steps"][0], trained["steps"][-1]
    assert bool(first["indexer_loss"]) == (stage in LEARN)
    learned = "indexer_loss" if stage == "warmup" else "lm_loss"
    assert last[learned] < first[learned]
    earlier, later = (trained["evaluations"][step] for step in (HALF, STEPS))
    if stage == "warmup":
        assert later == pytest.approx(earlier, rel=1e-2), "the model is frozen, and attends to all keys"
    else:
        assert later < earlier
    note.trained([trained])


@pytest.mark.parametrize("model", MODELS)
def test_each_model(note: Note, tmp_path: Path, model: str) -> None:
    """The recipe has four layers; GLM-5.2's last layer shares a selection."""
    note.begins("pretrain_gpt.py, TP2+SP", "dsa-model")
    trained = ten_steps(tmp_path, f"--dsa-model {model} {FUSED}")
    assert trained["evaluations"][STEPS] < trained["evaluations"][HALF]
    assert all(record["indexer_loss"] > 0 for record in trained["steps"])
    note.trained([trained])


def test_a_schedule_of_our_own(note: Note, tmp_path: Path) -> None:
    """The first rank holds both ends of the model, and the last rank reports the losses."""
    if note.begins("pretrain_gpt.py, PP2", "dualpipev", switches={"schedules_method": "dualpipev"}):
        return
    trained = ten_steps(tmp_path, "--schedules-method dualpipev", V)
    assert trained["evaluations"][STEPS] < trained["evaluations"][HALF]
    note.trained([trained])


@pytest.mark.releases(">=0.14")
def test_tied_embeddings_under_a_schedule_of_our_own(tmp_path: Path) -> None:
    """From 0.16 on, the script itself names the ranks with embeddings, the first and the last."""
    recipe = Path(shutil.copytree(RECIPE, tmp_path / "recipe"))
    script = recipe / "pretrain_gpt_dsa.sh"
    text = script.read_text(encoding="utf-8")
    assert UNTIED in text
    script.write_text(text.replace(UNTIED, ""), encoding="utf-8")
    stock, ours = (
        pretrain(tmp_path / name, flags, V, str(script))["steps"]
        for name, flags in (("stock", ""), ("ours", "--schedules-method dualpipev"))
    )
    assert [record["lm_loss"] for record in ours] == pytest.approx([r["lm_loss"] for r in stock], rel=0.02)
    assert ours[-1]["lm_loss"] < ours[0]["lm_loss"]


@pytest.mark.releases(">=0.16")
def test_losses_of_multi_token_prediction_are_logged_under_a_schedule_of_our_own(tmp_path: Path) -> None:
    """The first rank has them, and the last rank writes the log."""
    logged = {}
    for name, flags in (("stock", ""), ("ours", "--schedules-method dualpipev")):
        command, environment = job(tmp_path / name, f"{flags} --mtp-num-layers 1", V)
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
        assert done.returncode == 0, done.stderr[-6000:]
        logged[name] = list(map(float, PREDICTED.findall(done.stdout + done.stderr)))
    assert len(logged["ours"]) == len(logged["stock"]) == 3
    assert logged["ours"] == pytest.approx(logged["stock"], rel=0.02)
