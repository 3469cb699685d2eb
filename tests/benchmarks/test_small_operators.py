"""The benchmark of small operators, on a tiny model, reports every metric."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.support import third_party

third_party.or_skip("megatron.core")


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles for CPUs")
def test_every_metric_is_measured():
    from benchmarks import small_operators

    result = small_operators.run("cpu", quick=True)
    json.dumps(result)
    assert result["failed"] == []
    for metric in ("dispatches_per_layer", "host_us_per_layer"):
        figures = result[metric]["small"]
        assert figures["ratio"] == pytest.approx(figures["ours"] / figures["stock"])
        assert figures["ours"] > 0
    assert result["dispatches_per_layer"]["small"]["ratio"] < 0.75
    assert result["saved_bytes_ratio"]["small"] <= 1
    assert result["graph_breaks"]["small"] == result["recompilations"]["small"] == 0
    assert result["regions"]["small"]


def test_launches_are_operators_that_do_the_work():
    import torch

    from benchmarks.small_operators.launches import is_launch

    linear, states = torch.nn.Linear(3, 3), torch.ones(2, 3)
    with torch.autograd.profiler.profile() as profile:
        torch.relu(linear(states)).view(-1).sum()
        torch.einsum("ab,cb->ac", states, states).to(torch.bfloat16)
    names = [event.name for event in profile.function_events if is_launch(event)]
    # linear and einsum only call these; the views and copies inside them do not count.
    assert names == ["aten::addmm", "aten::relu", "aten::sum", "aten::bmm", "aten::_to_copy"]
