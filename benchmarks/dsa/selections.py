"""Random selections like an indexer's, with a given overlap between neighbouring rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ROWS = 1024
"""Rows whose scores are in memory at a time."""
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
    """Return random top-k selections, ``[1, rows, topk]`` int32, -1 for empty entries.

    A key's scores are normal and follow an autoregressive process over the rows. Its correlation is set so
    that neighbouring rows share the requested fraction of their keys.

    Args:
        rows: number of rows of the sequence, and of keys.
        topk: keys per row.
        shared: fraction of a row's keys that the next row also selects. None: independent rows, which share
            ``topk`` over the number of visible keys; a smaller fraction is not possible.
        full: whether all rows see all keys, instead of keys up to their own.
        ascending: whether a row's keys ascend, instead of a random order. -1 comes last.
        device: device of the result.
        seed: seed of the scores; ``seed + 1`` is the seed of the random orders.

    Raises:
        ValueError: ``shared`` is not in [0, 1), or ``topk`` exceeds ``rows``.
    """
    if shared is not None and not 0 <= shared < 1:
        raise ValueError(f"rows cannot share {shared} of their keys: give a fraction from 0 to below 1")
    if topk > rows:
        raise ValueError(f"{topk} of {rows} keys cannot be chosen")
    generator, orders = (torch.Generator(device).manual_seed(seed + each) for each in range(2))
    visible = torch.full((rows,), rows) if full else torch.arange(1, rows + 1)
    kept = _correlations(topk / visible, shared)
    # kept x previous + fresh x noise keeps a variance of 1.
    fresh = (1 - kept**2).sqrt().float().to(device)
    visible = visible[:, None].to(device)
    keys = torch.arange(rows, device=device)
    previous = torch.randn(rows, generator=generator, device=device)
    indices = torch.empty(1, rows, topk, dtype=torch.int32, device=device)
    for start in range(0, rows, _ROWS):
        part = slice(start, start + _ROWS)
        seen = visible[part]
        scores = torch.randn(len(seen), rows, generator=generator, device=device) * fresh[part, None]
        if shared is not None:
            for row, correlation in zip(scores, kept[part].tolist(), strict=True):
                previous = row.add_(previous, alpha=correlation)
            previous = previous.clone()  # later rows see keys that are hidden here
        scores.masked_fill_(keys >= seen, -math.inf)
        selected = scores.topk(topk, sorted=False).indices
        order = selected if ascending else torch.rand(selected.shape, generator=orders, device=device)
        # Hidden keys are sorted to the end, where they become -1.
        selected = selected.gather(1, order.masked_fill(selected >= seen, rows).argsort(1))
        indices[0, part] = selected.masked_fill_(selected >= seen, -1)
    return indices


def shared_with(indices: Tensor, apart: int = 1) -> Tensor:
    """Return the fraction of each row's keys that the row ``apart`` rows later also has, ``[rows - apart]``.

    Args:
        indices: selected keys ``[rows, topk]``, -1 for empty entries; unique in a row, at least one per row.
        apart: distance between the rows.
    """
    one, other = indices[:-apart], indices[apart:]
    # Keys are unique in a row, so equal neighbours in the sorted union are shared; -1 and -2 never are.
    both = torch.cat([one, other.masked_fill(other < 0, -2)], 1).sort(1).values
    same = (both[:, 1:] == both[:, :-1]) & (both[:, 1:] >= 0)
    return same.sum(1) / (one >= 0).sum(1)


def _correlations(chosen: Tensor, shared: float | None) -> Tensor:
    """Return the correlation of each row's scores with the row before, float64.

    Two normal numbers with correlation ``sin(u)``, each above the level ``z`` with probability ``p``, are
    both above it with probability ``p**2`` plus the integral of ``exp(-z**2 / (1 + sin(t))) / (2 pi)`` over
    ``t`` from 0 to ``u`` (Plackett's identity).

    Args:
        chosen: fraction of the visible keys that a row selects, ``[rows]``; above 1 it selects all.
        shared: see :func:`draw`.
    """
    if shared is None:
        return torch.zeros(len(chosen), dtype=torch.float64)
    # Rows that select all keys share all of them at any correlation.
    levels = torch.linspace(float(chosen.min().clamp(max=0.99)), 0.99, _GRID, dtype=torch.float64)
    angles = torch.linspace(0, math.pi / 2, _GRID, dtype=torch.float64)
    squares = torch.special.ndtri(levels)[:, None] ** 2
    density = torch.exp(-squares / (1 + angles.sin())) / (2 * math.pi)
    # The cumulative integral begins at the second angle.
    both = levels[:, None] ** 2 + torch.cumulative_trapezoid(density, angles, dim=1)
    at = torch.searchsorted(both, shared * levels[:, None]).squeeze(1) + (shared > levels)
    place = torch.searchsorted(levels, chosen.double().clamp(max=0.99))
    return angles[at.clamp(max=_GRID - 1)].sin()[place]
