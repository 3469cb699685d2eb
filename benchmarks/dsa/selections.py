"""Selections as an indexer makes them, drawn: how much neighbouring rows share is given."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ROWS = 1024
"""Rows whose scores exist at a time."""
_GRID = 513


def draw(
    rows: int,
    topk: int,
    *,
    shared: float | None = None,
    full: bool = False,
    ascending: bool = True,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> Tensor:
    """Return the keys of the ``topk`` largest scores of each row, ``[1, rows, topk]``, int32, -1 for none.

    A key's score is normal in every row, with the correlation to its score of the row before that leaves the
    wanted fraction of the selection (an autoregressive process).

    Args:
        rows: of the sequence, and keys.
        topk: keys of a row.
        shared: fraction of a row's keys that the next row has, too; None for rows that are independent, which
            share ``topk`` over the number of visible keys. Less than that is not possible.
        full: all rows see all keys; else each those up to its own.
        ascending: order of a row's keys; else the same keys in random order. What is -1 stands behind them.
        device: where.
        seed: of all numbers, with the one behind it.

    Raises:
        ValueError: ``shared`` is no fraction below 1, or there are fewer keys than are chosen.
    """
    if shared is not None and not 0 <= shared < 1:
        raise ValueError(f"rows cannot share {shared} of their keys: give a fraction from 0 to below 1")
    if topk > rows:
        raise ValueError(f"{topk} of {rows} keys cannot be chosen")
    generator, orders = (torch.Generator(device).manual_seed(seed + each) for each in range(2))
    visible = torch.full((rows,), rows) if full else torch.arange(1, rows + 1)
    kept = _correlations(topk / visible, shared)
    fresh = (1 - kept**2).sqrt().float().to(device)
    visible = visible[:, None].to(device)
    keys = torch.arange(rows, device=device)
    previous = torch.randn(rows, generator=generator, device=device)
    found = torch.empty(1, rows, topk, dtype=torch.int32, device=device)
    for start in range(0, rows, _ROWS):
        part = slice(start, start + _ROWS)
        seen = visible[part]
        scores = torch.randn(len(seen), rows, generator=generator, device=device) * fresh[part, None]
        if shared is not None:
            for row, correlation in zip(scores, kept[part].tolist(), strict=True):
                previous = row.add_(previous, alpha=correlation)
            previous = previous.clone()  # what is hidden now is seen later
        scores.masked_fill_(keys >= seen, -math.inf)
        chosen = scores.topk(topk, sorted=False).indices
        order = chosen if ascending else torch.rand(chosen.shape, generator=orders, device=device)
        chosen = chosen.gather(1, order.masked_fill(chosen >= seen, rows).argsort(1))
        found[0, part] = chosen.masked_fill_(chosen >= seen, -1)
    return found


def shared_with(indices: Tensor, apart: int = 1) -> Tensor:
    """Return the fraction of each row's keys that the row ``apart`` rows later has, too: ``[rows - apart]``.

    Args:
        indices: ``[rows, topk]``, -1 for none; no key twice in a row, at least one in each.
        apart: distance of the rows.
    """
    one, other = indices[:-apart], indices[apart:]
    both = torch.cat([one, other.masked_fill(other < 0, -2)], 1).sort(1).values
    same = (both[:, 1:] == both[:, :-1]) & (both[:, 1:] >= 0)
    return same.sum(1) / (one >= 0).sum(1)


def _correlations(chosen: Tensor, shared: float | None) -> Tensor:
    """Return the correlation of each row's scores with those of the row before, float64.

    Two normal numbers with correlation ``sin(u)``, each above the level ``z`` with probability ``p``, are
    both above it with probability ``p**2`` and the integral of ``exp(-z**2 / (1 + sin(t))) / (2 pi)`` over
    ``t`` from 0 to ``u`` (Plackett's identity).

    Args:
        chosen: fraction of the visible keys that a row chooses, ``[rows]``; above 1 it chooses all.
        shared: as :func:`draw` takes it.
    """
    if shared is None:
        return torch.zeros(len(chosen), dtype=torch.float64)
    # Rows that choose all keys are the same ones with any correlation.
    levels = torch.linspace(float(chosen.min().clamp(max=0.99)), 0.99, _GRID, dtype=torch.float64)
    angles = torch.linspace(0, math.pi / 2, _GRID, dtype=torch.float64)
    squares = torch.special.ndtri(levels)[:, None] ** 2
    density = torch.exp(-squares / (1 + angles.sin())) / (2 * math.pi)
    # It begins behind the first angle.
    both = levels[:, None] ** 2 + torch.cumulative_trapezoid(density, angles, dim=1)
    at = torch.searchsorted(both, shared * levels[:, None]).squeeze(1) + (shared > levels)
    place = torch.searchsorted(levels, chosen.double().clamp(max=0.99))
    return angles[at.clamp(max=_GRID - 1)].sin()[place]
