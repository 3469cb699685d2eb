"""The benchmark of small operators on a model too small to say anything: every metric is there."""

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

    found = small_operators.run("cpu", quick=True)
    json.dumps(found)
    assert found["failed"] == []
    for metric in ("dispatches_per_layer", "host_us_per_layer"):
        figures = found[metric]["small"]
        assert figures["ratio"] == pytest.approx(figures["ours"] / figures["stock"])
        assert figures["ours"] > 0
    assert found["dispatches_per_layer"]["small"]["ratio"] < 0.75
    assert found["saved_bytes_ratio"]["small"] <= 1
    assert found["graph_breaks"]["small"] == found["recompilations"]["small"] == 0
    assert found["regions"]["small"]


def test_launches_are_operators_that_do_the_work():
    import torch

    from benchmarks.small_operators.launches import is_launch

    linear, states = torch.nn.Linear(3, 3), torch.ones(2, 3)
    with torch.autograd.profiler.profile() as profile:
        torch.relu(linear(states)).view(-1).sum()
        torch.einsum("ab,cb->ac", states, states).to(torch.bfloat16)
    names = [event.name for event in profile.function_events if is_launch(event)]
    # Not linear and einsum, which call these; not the views and copies inside of them.
    assert names == ["aten::addmm", "aten::relu", "aten::sum", "aten::bmm", "aten::_to_copy"]
