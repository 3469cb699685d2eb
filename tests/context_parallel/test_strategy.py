"""Strategies attend as one rank does; the strategy on the page runs as it is written there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.context_parallel import algorithms
from mindspeed_dsa.context_parallel.gather import KeyGather
from mindspeed_dsa.context_parallel.layout import Zigzag
from mindspeed_dsa.context_parallel.strategy import Exchanged

# -- functions that run in the pool's workers ------------------------------------------------------


LENGTH, BATCH, HEADS, DIM, VALUE_DIM = 24, 2, 2, 4, 3


def inner(given: Exchanged) -> Tensor:
    """Compute attention with a masked softmax."""
    rows = torch.arange(given.query.size(0)) if given.positions is None else given.positions
    scores = torch.einsum("sbhd,tbhd->bhst", given.query, given.key)
    hidden = torch.arange(given.key.size(0)) > rows[:, None]
    return torch.einsum("bhst,tbhd->sbhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), given.value)


def attended(block_rows: int = 0, code: str = "", name: str = "") -> dict[str, float]:
    """Return the largest relative differences of the output and of all gradients.

    Args:
        block_rows: number of rows in a block of the layout.
        code: code that defines and registers a strategy; empty for gathered keys.
        name: name under which the code registers it.
    """
    make = KeyGather
    if code:
        exec(compile(code, "the page", "exec"), {})
        make = algorithms.registered(name)
        algorithms.unregister(name)
    strategy = make(dist.group.WORLD, Zigzag(dist.get_world_size(), block_rows))
    generator = torch.manual_seed(0)
    whole = [torch.randn(LENGTH, BATCH, HEADS, dim, generator=generator) for dim in (DIM, DIM, VALUE_DIM)]
    weights = torch.randn(LENGTH, BATCH, HEADS, VALUE_DIM, generator=generator)
    expected = [tensor.clone().requires_grad_() for tensor in whole]
    theirs = inner(Exchanged(*expected))
    (theirs * weights).sum().backward()
    mine = [strategy.split(tensor).requires_grad_() for tensor in whole]
    ours = strategy.attend(inner, *mine)
    (ours * strategy.split(weights)).sum().backward()
    pairs = {"output": (ours, theirs)}
    pairs |= {n: (m.grad, e.grad) for n, m, e in zip("qkv", mine, expected, strict=True)}
    return {
        n: float((our - strategy.split(their)).abs().max() / their.abs().max())
        for n, (our, their) in pairs.items()
    }


CASES = "tests.context_parallel.test_strategy"
PAGE = Path(__file__).parents[2] / "docs" / "features" / "context-parallel.md"


@pytest.mark.parametrize("block_rows", [0, 2])
def test_gathered_keys_give_the_attention_of_one_rank(pool, block_rows):
    for differences in pool.run(f"{CASES}:attended", 2, block_rows=block_rows):
        assert max(differences.values()) < 1e-6


def test_the_strategy_of_the_page(pool):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    for differences in pool.run(f"{CASES}:attended", 2, code=code, name="narrow_keys"):
        assert 1e-4 < max(differences.values()) < 2e-2, "rounded, and not wrong"
