"""Cases for process groups: causal attention of one rank's rows against that of the whole sequence."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.context_parallel import algorithms
from mindspeed_dsa.context_parallel.gather import KeyGather
from mindspeed_dsa.context_parallel.layout import Zigzag
from mindspeed_dsa.context_parallel.strategy import Exchanged

LENGTH, BATCH, HEADS, DIM, VALUE_DIM = 24, 2, 2, 4, 3


def inner(given: Exchanged) -> Tensor:
    """Masked softmax."""
    rows = torch.arange(given.query.size(0)) if given.positions is None else given.positions
    scores = torch.einsum("sbhd,tbhd->bhst", given.query, given.key)
    hidden = torch.arange(given.key.size(0)) > rows[:, None]
    return torch.einsum("bhst,tbhd->sbhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), given.value)


def attended(block_rows: int = 0, code: str = "", name: str = "") -> dict[str, float]:
    """Largest relative differences of the output and of all gradients.

    Args:
        block_rows: of the layout.
        code: defines and registers a strategy; default: gathered keys.
        name: under which it is registered.
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
