"""The benchmark of transformers' models: a figure of each way, and a way that exceeds memory."""

from __future__ import annotations

import pytest

from benchmarks import transformers_models
from tests.hosts.transformers.models import in_release

pytestmark = pytest.mark.full


@pytest.mark.parametrize("family", [name for name in transformers_models.FAMILIES if in_release(name)])
def test_each_way_is_measured_in_a_process_of_its_own(family):
    ways = transformers_models.WAYS if family == "deepseek_v32" else transformers_models.WAYS[2:]
    for way in ways:
        what = transformers_models.PASSES[2 if way == "mindspeed_dsa" else 1]
        found = transformers_models.measured(way, what, (64, 128), quick=True, family=family)
        assert list(found) == ["64", "128"]
        for figures in found.values():
            assert set(figures) == {"seconds", "cpu_seconds", "extra_mib"}
            assert figures["seconds"] > 0


def test_a_way_that_needs_more_memory_says_so():
    """Index scores of 8 heads for 65536 tokens are 128 GiB; such a tensor is refused before it is touched."""
    found = transformers_models.measured("eager", transformers_models.PASSES[0], (64, 65536), quick=True)
    assert found["64"]["seconds"] > 0
    assert found["65536"] == f"more than {transformers_models.LIMIT_GIB} GiB"
