"""The benchmark of the chunked loss, on a tiny problem, reports every metric."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import third_party

third_party.or_skip("megatron.core")

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_every_metric_is_measured(tmp_path):
    result = tmp_path / "result.json"
    # A process of its own: the case has a default process group, as other tests of this process may have.
    command = "-m benchmarks linear-cross-entropy --quick --device cpu --json".split()
    subprocess.run([sys.executable, *command, result], cwd=ROOT, check=True, capture_output=True)
    figures = json.loads(result.read_text())["metrics"]
    for dtype in ("fp32", "bf16"):
        for metric in ("loss_memory_ratio", "loss_time_ratio", "loss_cpu_time_ratio"):
            assert all(figures[metric][dtype][gradient] > 0 for gradient in ("forward", "backward"))
        assert figures["peak_mib"][dtype].keys() == {"stock", "forward", "backward"}


def test_a_side_that_computes_something_else_is_refused():
    import torch

    from benchmarks import linear_cross_entropy as case

    problem = case.Problem.of(case.Sizes(64, 256, 16), torch.float32, "cpu")
    sides = {"ours": case.ours("forward")}
    case._require_same("fp32", problem, sides)
    halved = {"halved": lambda each: case.ours("forward")(each) / 2}
    with pytest.raises(RuntimeError, match="halved, fp32: losses differ"):
        case._require_same("fp32", problem, halved)
