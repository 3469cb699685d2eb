"""The benchmark of saves, on a tiny state, reports every metric."""

from __future__ import annotations

import json

import pytest

from tests.support import third_party

third_party.or_skip("megatron.core")


@pytest.mark.full
def test_every_metric_is_measured() -> None:
    from benchmarks import checkpoints

    result = checkpoints.run("cpu", quick=True)
    json.dumps(result)
    assert "failed" not in result
    for metric in ("synchronous_s", "blocking_ratio", "with_manifest_s"):
        assert result[metric] > 0
    for of_job in result["example job"].values():
        assert of_job["blocking_ratio"] > 0
        assert of_job["state_bytes"] > 0
    assert len(result["example job"]) == 5
    assert result["verify_overhead"] > -1  # a difference of short times, which is mostly noise
