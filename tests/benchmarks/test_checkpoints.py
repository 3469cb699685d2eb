"""The benchmark of saves on a state too small to say anything: every metric is there, all is whole."""

from __future__ import annotations

import json

import pytest

from tests.support import third_party

third_party.or_skip("megatron.core")


@pytest.mark.full
def test_every_metric_is_measured() -> None:
    from benchmarks import checkpoints

    found = checkpoints.run("cpu", quick=True)
    json.dumps(found)
    assert "failed" not in found
    for metric in ("synchronous_s", "blocking_ratio", "with_manifest_s"):
        assert found[metric] > 0
    for of_job in found["example job"].values():
        assert of_job["blocking_ratio"] > 0
        assert of_job["state_bytes"] > 0
    assert len(found["example job"]) == 5
    assert found["verify_overhead"] > -1  # a difference, of which nothing is known in so short a time
