"""Grouped experts beside sequential ones on other releases."""

from __future__ import annotations

from importlib import metadata

import pytest
from packaging.version import Version

CASES = "tests.features.moe.grouped_experts.cases"
DSA = {"experimental_attention_variant": "dsa"}  # so that older releases know the tests' configuration
CUTS_PARAMETERS = Version(metadata.version("megatron-core")) < Version("0.16")


def test_layers(pool):
    for built in pool.run(f"{CASES}:layers", 2, ep=2, switches=DSA):
        assert built == ("GroupedExperts", "SequentialMLP")


def test_state_dicts(pool):
    pool.run(f"{CASES}:state_dicts", 1, switches=DSA)


@pytest.mark.skipif(not CUTS_PARAMETERS, reason="from 0.16 on optimizer state is not saved in flat pieces")
def test_optimizer_state_in_flat_pieces(pool):
    pool.run(f"{CASES}:flat_pieces", 2, ep=2, switches=DSA)
