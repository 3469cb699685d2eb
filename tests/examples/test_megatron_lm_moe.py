"""Megatron-LM's own pretrain_gpt.py without and with each MoE feature, if there is a checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mindspeed_dsa.runs import expert_load, expert_placement, metrics
from mindspeed_dsa.runs.expert_placement import Placement
from tests.examples.test_megatron_lm import RECIPE
from tests.support.memory_events import COUNTED, GROUPED, MOVED, PERMUTED, PLACED, STARTED

# Counts the features' activity in the script's processes. `tests` is ours here, later the checkout's.
COUNTING = """
import json, os, runpy
from tests.support import memory_events

run_path = runpy.run_path

def counted_run(script, **arguments):
    with memory_events.counted() as counts:
        run_path(script, **arguments)
    with open(os.path.join(os.environ["COUNTS"], os.environ["RANK"]), "w") as file:
        json.dump(counts, file)

runpy.run_path = counted_run
"""
EVENTS = {
    "--moe-alltoall-overlap-comm": STARTED,
    "--balanced-moe-experts --balanced-moe-matmul-rate 1e-6 --balanced-moe-link-rate 1e6": MOVED,
    "--moe-expert-placement {folder}/placement.json": PLACED,
    "--moe-grouped-gemm": GROUPED,
    "--moe-permute-fusion": PERMUTED,
    "--moe-router-load-report {folder}/load": COUNTED,
}
ALL = " ".join(EVENTS)
EP2 = "--expert-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
EXTENDED = f"{TP2} --moe-tp-extend-ep"
ORDERS = {2: [0, 2, 1, 3], 3: [3, 0, 1, 2], 4: [2, 3, 0, 1]}
STEPS = 4


class Run(NamedTuple):
    """Output, records of the steps, and event counts over both ranks."""

    printed: str
    steps: Mapping[int, Mapping[str, Any]]
    events: Counter[str]


def pretrain(folder: Path, flags: str) -> Run:
    """Run some steps of the recipe on two ranks."""
    counts, written = folder / "counts", folder / "metrics.jsonl"
    counts.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(COUNTING)
    expert_placement.write(folder / "placement.json", Placement(4, 2, ORDERS))
    environment = {**os.environ, "NPROC": "2", "PYTHON": sys.executable, "COUNTS": str(counts)}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(RECIPE.parents[1]), *sys.path])
    command = ["bash", str(RECIPE / "pretrain_gpt_dsa.sh"), "--step-metrics-file", str(written)]
    command += f"--train-iters {STEPS} --lr-decay-iters 50 --eval-interval 100".split()
    command += f"--use-distributed-optimizer {flags}".format(folder=folder).split()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-6000:]
    assert len(list(counts.iterdir())) == 2
    events: Counter[str] = sum(
        (Counter(json.loads(file.read_text())) for file in counts.iterdir()), Counter()
    )
    return Run(
        done.stdout + done.stderr, {record["step"]: record for record in metrics.read(written)}, events
    )


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Return runs without our features, by layout."""
    flags = {EP2: EP2, EXTENDED: f"{TP2} {EP2} --expert-tensor-parallel-size 1"}
    return {layout: pretrain(tmp_path_factory.mktemp("stock"), stock) for layout, stock in flags.items()}


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no checkout of Megatron-LM")
@pytest.mark.parametrize(
    ("layout", "features"),
    [*((EP2, features) for features in EVENTS), (EP2, ALL), (EXTENDED, ""), (EXTENDED, ALL)],
    ids=[
        *(features.split()[0] for features in EVENTS),
        "all",
        "--moe-tp-extend-ep",
        "all, --moe-tp-extend-ep",
    ],
)
def test_losses_are_those_without(stock: dict[str, Run], tmp_path: Path, layout: str, features: str) -> None:
    """From Megatron's own initial weights, which are equal with every feature."""
    assert not any(stock[layout].events[event] for event in EVENTS.values())
    ours = pretrain(tmp_path / "ours", f"{layout} {features}")
    for flags, event in EVENTS.items():
        assert (ours.events[event] > 0) == (flags in features), event
    assert ("experts: tensor parallel 2 x expert parallel 1" in ours.printed) == (layout == EXTENDED)
    if "load-report" in features:
        steps = [record["step"] for record in expert_load.read(tmp_path / "ours" / "load")]
        assert steps == list(range(1, STEPS + 1))
    assert list(ours.steps) == list(stock[layout].steps) == list(range(1, STEPS + 1))
    for step, record in ours.steps.items():
        expected = stock[layout].steps[step]
        assert record["lm_loss"] == pytest.approx(expected["lm_loss"], rel=1e-5)
        assert record["grad_norm"] == pytest.approx(expected["grad_norm"], rel=5e-4)
