"""The benchmark of the chunked loss, on a tiny problem, reports every metric."""

from __future__ import annotations

import json

import pytest

from tests.support import third_party

third_party.or_skip("megatron.core")


@pytest.mark.full
def test_every_metric_is_measured():
    from benchmarks import linear_cross_entropy

    figures = linear_cross_entropy.run("cpu", quick=True)
    json.dumps(figures)
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
