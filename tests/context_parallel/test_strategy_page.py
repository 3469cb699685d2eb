"""The page about writing a strategy: its code trains as one rank does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.features.attention.context_parallel import dense_model
from tests.support import model as job

PAGE = Path(__file__).parents[2] / "docs" / "design" / "context-parallel-strategy.md"
LINES = 30


def page_code() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return code


def trained(**arguments: Any) -> dict[str, Any]:
    """Run a step with the page's strategy, in the pool's workers."""
    from mindspeed_dsa.context_parallel import algorithms

    namespace: dict[str, Any] = {"__name__": "page"}
    exec(compile(page_code(), str(PAGE), "exec"), namespace)
    attended: list[tuple[int, ...]] = []
    strategy = namespace["WholeSequences"]
    exchange = strategy.exchange

    def told(self: Any, query: Any, key: Any, value: Any) -> Any:
        exchanged = exchange(self, query, key, value)
        attended.append(tuple(exchanged.query.shape[:3]))
        return exchanged

    strategy.exchange = told
    try:
        return {**dense_model.step(algorithm="whole_sequences", **arguments), "attended": attended}
    finally:
        algorithms.unregister("whole_sequences")


def test_the_page_is_as_short_as_it_says():
    body = page_code().split("class ", 1)[1]
    assert len([line for line in body.splitlines() if line.strip()]) <= LINES


@pytest.mark.parametrize("attention", ["grouped", pytest.param("latent", marks=pytest.mark.full)])
def test_the_page_trains_as_one_rank(pool, attention):
    (expected,) = pool.run(
        "tests.features.attention.context_parallel.dense_model:step", 1, attention=attention
    )
    ranks = pool.run("tests.context_parallel.test_strategy_page:trained", 2, attention=attention, cp=2)
    found = dense_model.in_one_group(ranks, cp=2, tp=1)
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-5, atol=0)
    job.assert_same_gradients(found["gradients"], expected["gradients"], rtol=1e-5)
    # Two layers times two microbatches; each call has a whole sequence, one sample, and all heads.
    assert all(rank["attended"] == [(dense_model.SEQUENCE, 1, dense_model.HEADS)] * 4 for rank in ranks)
