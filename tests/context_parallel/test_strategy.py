"""Strategies attend as one rank does; that of the page is run as it is written there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CASES = "tests.context_parallel.strategy_cases"
PAGE = Path(__file__).parents[2] / "docs" / "features" / "context-parallel.md"


@pytest.mark.parametrize("block_rows", [0, 2])
def test_gathered_keys_give_the_attention_of_one_rank(pool, block_rows):
    for differences in pool.run(f"{CASES}:attended", 2, block_rows=block_rows):
        assert max(differences.values()) < 1e-6


def test_the_strategy_of_the_page(pool):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    for differences in pool.run(f"{CASES}:attended", 2, code=code, name="narrow_keys"):
        assert 1e-4 < max(differences.values()) < 2e-2, "rounded, and not wrong"
