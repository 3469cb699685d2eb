"""Megatron-LM's own pretrain_gpt.py, untouched, if ``MEGATRON_LM`` names a checkout of the release."""

from __future__ import annotations

import filecmp
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mindspeed_dsa import features as catalogue
from mindspeed_dsa.patches import versions
from mindspeed_dsa.runs import metrics
from mindspeed_dsa.session.start_report import REPORT_FILE
from tests.matrix.record import Note, features_at_work

pytestmark = pytest.mark.releases(">=0.12.1")

RECIPE = Path(__file__).parents[2] / "examples" / "megatron_lm"
LAYOUT = "--tensor-model-parallel-size 2 --sequence-parallel"
FEATURES = (
    "--use-fused-dsa --recompute-activation-function --swap-attention "
    "--accept-mindspeed-flags --use-fused-moe-token-permute-and-unpermute"
)
SHARDED = "--use-torch-fsdp2 --fsdp2-prefetch 2"
TRANSLATED = "moe-permute-fusion"
"""Feature of the last of these flags, which is MindSpeed's."""
STEPS = 3
INFO = "package_info.py"
EVALUATION = re.compile(r"validation loss at iteration (\d+) [^|]*\|[^|]*lm loss value: (\S+)")
"""Megatron's line about an evaluation: the step, and the loss."""


def checkout() -> str | None:
    """Return the checkout of the installed release; paths are separated as in ``PATH``."""
    installed = versions.of_megatron()
    for folder in filter(None, os.environ.get("MEGATRON_LM", "").split(os.pathsep)):
        info = Path(folder, "megatron", "core", INFO)
        if info.is_file() and (
            versions.version_in_source(info.read_text(encoding="utf-8")) == installed
            or has_installed_sources(info.parent)
        ):
            return folder
    return None


def has_installed_sources(core: Path) -> bool:
    """Return whether a checkout differs only in its number: tag core_v0.19.0 says 0.19.1."""
    (folder, *_) = find_spec("megatron").submodule_search_locations
    files = [file for file in Path(folder, "core").rglob("*.py") if file.name != INFO]
    pairs = ((file, core / file.relative_to(Path(folder, "core"))) for file in files)
    return all(theirs.is_file() and filecmp.cmp(file, theirs, shallow=False) for file, theirs in pairs)


def pretrain(
    folder: Path,
    features: str,
    layout: str = LAYOUT,
    script: str = "pretrain_gpt_dsa.sh",
    steps: int = STEPS,
    interval: int = 100,
) -> dict[str, Any]:
    """Train some steps of a recipe on two ranks.

    Returns:
        ``steps``, the records of the steps; ``evaluations``, the validation loss by step; ``at work``, the
        names of active features.
    """
    command, environment = job(folder, features, layout, script, steps, interval)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr[-6000:]
    evaluations = {int(step): float(loss) for step, loss in EVALUATION.findall(done.stdout + done.stderr)}
    return {
        "steps": metrics.read(folder / "steps.jsonl"),
        "evaluations": evaluations,
        "at work": reported(folder),
    }


def job(
    folder: Path,
    features: str,
    layout: str = LAYOUT,
    script: str = "pretrain_gpt_dsa.sh",
    steps: int = STEPS,
    interval: int = 100,
) -> tuple[list[str], dict[str, str]]:
    """Return command and environment of a job that writes into a new folder."""
    folder.mkdir()
    command = ["bash", str(RECIPE / script), *layout.split(), *features.split()]
    command += f"--train-iters {steps} --lr-decay-iters 50".split()
    command += f"--eval-interval {interval} --eval-iters 1".split()
    command += ["--step-metrics-file", str(folder / "steps.jsonl"), "--mindspeed-report-dir", str(folder)]
    # The dataset helpers are compiled in the checkout, for the Python whose python3-config comes first.
    programs = [os.path.dirname(sys.executable), os.path.join(sys.base_prefix, "bin"), os.environ["PATH"]]
    return command, {
        **os.environ,
        "MEGATRON_LM": str(checkout()),
        "NPROC": "2",
        "TINY": "1",
        "PYTHON": sys.executable,
        "PATH": os.pathsep.join(programs),
        "PYTHONPATH": os.pathsep.join([str(RECIPE.parents[1]), *sys.path]),
    }


def reported(folder: Path) -> list[str]:
    """Return the features that were active in a job with ``--mindspeed-report-dir``."""
    report = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
    declared = {feature.name: feature for feature in catalogue.shipped()}
    return features_at_work([declared[each["name"]] for each in report["features"]], report["sites"])


@pytest.mark.timeout(1100)
@pytest.mark.skipif(checkout() is None, reason="MEGATRON_LM names no checkout of the installed release")
def test_pretrain_gpt_trains_with_and_without(note: Note, tmp_path: Path) -> None:
    """From Megatron's own initial weights; memory features and fusions change only the last digits."""
    note.begins("pretrain_gpt.py, TP2+SP", "step-metrics", "megatron-arguments", "accept-mindspeed-flags")
    plain, ours = pretrain(tmp_path / "plain", ""), pretrain(tmp_path / "features", FEATURES)
    assert [record["step"] for record in ours["steps"]] == list(range(1, STEPS + 1))
    for mine, theirs in zip(ours["steps"], plain["steps"], strict=True):
        assert mine["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=1e-4)
        assert mine["indexer_loss"] == pytest.approx(theirs["indexer_loss"], rel=1e-2)
    assert ours["steps"][-1]["lm_loss"] < ours["steps"][0]["lm_loss"]
    added = set(ours["at work"]) - set(plain["at work"])
    assert {"recompute-activation-function", "swap-attention", TRANSLATED} <= added
    note.trained([ours])


@pytest.mark.timeout(1100)
@pytest.mark.skipif(checkout() is None, reason="MEGATRON_LM names no checkout of the installed release")
@pytest.mark.parametrize(
    ("name", "layout"), [("DP2", ""), ("EP2", "--expert-model-parallel-size 2")], ids=["dp2", "ep2"]
)
def test_pretrain_gpt_shards_with_fsdp2(note: Note, tmp_path: Path, name: str, layout: str) -> None:
    """Without experts Megatron completes the arguments itself; with experts it does not see FSDP2."""
    if note.begins(f"pretrain_gpt.py, {name}", "fsdp2", switches={"use_torch_fsdp2": True}):
        return
    plain, ours = pretrain(tmp_path / "plain", "", layout), pretrain(tmp_path / "ours", SHARDED, layout)
    assert [record["step"] for record in ours["steps"]] == list(range(1, STEPS + 1))
    for mine, theirs in zip(ours["steps"], plain["steps"], strict=True):
        assert mine["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    assert "fsdp2" in set(ours["at work"]) - set(plain["at work"])
    note.trained([ours])


GLM_STAGES = "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 6"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.timeout(1100)
@pytest.mark.skipif(checkout() is None, reason="MEGATRON_LM names no checkout of the installed release")
def test_glm_shares_selections_through_pretrain_gpt(note: Note, tmp_path: Path) -> None:
    """Layers 1, 2, 3 and 7 and the MTP layer select; recomputed layers read the same keys."""
    note.begins("pretrain_gpt.py, PP2", "dsa-shared-selections", "dsa-model")
    plain, ours = (
        pretrain(tmp_path / name, flags, GLM_STAGES, "pretrain_gpt_glm52.sh")
        for name, flags in (("plain", ""), ("recomputed", RECOMPUTED))
    )
    assert [record["step"] for record in ours["steps"]] == list(range(1, STEPS + 1))
    for mine, theirs in zip(ours["steps"], plain["steps"], strict=True):
        assert mine["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert mine["indexer_loss"] > 0
    assert ours["steps"][-1]["lm_loss"] < ours["steps"][0]["lm_loss"]
    assert {"dsa-shared-selections", "dsa-model"} <= set(ours["at work"])
    note.trained([ours])
