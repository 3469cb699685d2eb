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
    for metric in ("synchronous_s", "blocking_ratio", "verify_overhead"):
        assert found[metric] > 0
