from __future__ import annotations

import pytest

from tests.features.memory import pairs


@pytest.mark.full
def test_every_pair_combines_or_is_refused_as_documented(pool):
    assert pairs.table(dict(pairs.results(pool))) == pairs.written(), (
        "run python -m tests.features.memory.pairs"
    )


def test_the_table_knows_every_pair():
    outcomes = dict.fromkeys(pairs.pairs(), pairs.COMBINES)
    outcomes["recompute-norm", "swap-optimizer"] = "too odd"
    lines = pairs.table(outcomes).splitlines()
    assert len(pairs.pairs()) == 15
    assert sum(line.count(" yes ") for line in lines) == 14
    assert next(line for line in lines if "refused (1)" in line).startswith("| recompute-norm |")
    assert lines[-1] == "1. too odd"
