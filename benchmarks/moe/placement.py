"""Experts placed by a recorded load: balance of later tokens of a simulated router."""

from __future__ import annotations

import statistics
import sys

import torch

from benchmarks.registry import Metrics
from mindspeed_dsa.runs.expert_load import imbalance
from mindspeed_dsa.runs.expert_placement import balanced, rank_loads

EXPERTS, TOPK, RANKS, ZIPF = 64, 6, 4, 1.0
TOKENS = 65536


def run(link: str, quick: bool) -> Metrics:
    """Return the cell's entries; the link is not used."""
    tokens = TOKENS // 16 if quick else TOKENS
    recorded, later = (router_loads(EXPERTS, TOPK, ZIPF, tokens, seed) for seed in (0, 1))
    entries = {
        "placement_imbalance": imbalance(rank_loads(later, balanced(recorded, RANKS), RANKS)),
        "placement_imbalance_in_order": imbalance(rank_loads(later, list(range(EXPERTS)), RANKS)),
        "placement_imbalance_at_random": statistics.median(
            imbalance(rank_loads(later, _shuffled(seed), RANKS)) for seed in range(101)
        ),
    }
    print(f"placement: {entries}", file=sys.stderr, flush=True)
    return entries


def router_loads(experts: int, topk: int, exponent: float, tokens: int, seed: int) -> list[int]:
    """Return tokens by expert of a router that chooses ``topk`` different experts per token.

    Experts are chosen as often as Zipf's law with ``exponent`` says; the most popular ones are neighbours.
    """
    popularity = torch.arange(1, experts + 1, dtype=torch.float64) ** -exponent
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(tokens, experts, generator=generator, dtype=torch.float64)
    # Gumbel noise: the largest k are a draw of k without replacement.
    chosen = (popularity.log() - (-uniform.log()).log()).topk(topk, dim=1).indices
    return torch.bincount(chosen.flatten(), minlength=experts).tolist()  # type: ignore[no-any-return]


def _shuffled(seed: int) -> list[int]:
    return torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(seed)).tolist()  # type: ignore[no-any-return]
