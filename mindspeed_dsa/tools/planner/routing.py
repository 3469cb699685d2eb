"""Imbalance of routed tokens, and the number of ranks or nodes to which a router sends a token.

Megatron's flex dispatchers (DeepEP, HybridEP) send a token once to each node with some of its experts, and
there once to each rank. The all-to-all dispatcher sends one copy for each expert.
"""

from __future__ import annotations

import argparse
from functools import lru_cache
from math import comb
from typing import NamedTuple

FORCED, BIASED, FEW, LOSS = "forced balance", "expert bias", "few experts", "auxiliary loss or none"
IMBALANCES = {FORCED: 1.0, BIASED: 1.1, FEW: 1.05, LOSS: 1.45}
"""Tokens on the fullest expert parallel rank over the mean of all ranks, by kind of balancing.

Times of published jobs with natural routing and with forced balance give 1.41 to 1.48 in five pairs of runs
with 128 experts and an auxiliary loss, and 1.05 in one pair with 8 experts. 1.1 with an expert bias is from a
single run.
"""
_FEW = 8


def balancing_of(options: argparse.Namespace) -> str:
    """Return the kind of balancing of a job, a key of :data:`IMBALANCES`."""
    if options.moe_router_force_load_balancing or not options.num_experts:
        return FORCED
    if options.moe_router_enable_expert_bias or options.balanced_moe_experts:
        return BIASED
    return FEW if options.num_experts <= _FEW else LOSS


class Routing(NamedTuple):
    """Settings that decide where a token is sent.

    Attributes:
        experts: number of experts.
        topk: number of a token's experts.
        groups: number of the router's groups, each a range of experts; 1 or less for no groups.
        group_topk: number of groups that a token's experts come from.
        neighbours: whether a token's experts are consecutive, beginning at a multiple of ``topk``.
    """

    experts: int
    topk: int
    groups: int = 0
    group_topk: int = 0
    neighbours: bool = False


@lru_cache(maxsize=1024)
def copies(routing: Routing, parts: int) -> float:
    """Return the mean number of different parts with experts of a token, for random routing.

    Args:
        routing: router's settings.
        parts: number of ranks or nodes, over which the experts are divided evenly in their order.
    """
    experts, topk, groups, group_topk, neighbours = routing
    if parts <= 1:
        return float(parts)
    if neighbours:
        # 8 experts from a multiple of 8 on: one rank with 16 experts, two ranks with 4 each.
        return max(1.0, topk * parts / experts)
    groups = groups if groups > 1 and 0 < group_topk < groups else 1
    token_groups = group_topk if groups > 1 else 1
    # Experts of one part that lie in one of its groups.
    held = min(experts // parts, experts // groups)
    ours = max(1, groups // parts)
    missed = 0.0
    for number in range(min(ours, token_groups) + 1):
        # A node with 2 of 8 groups has 0, 1 or 2 of a token's 4 groups.
        among = comb(ours, number) * comb(groups - ours, token_groups - number) / comb(groups, token_groups)
        missed += among * _all_elsewhere(token_groups * experts // groups, number * held, topk)
    return parts * (1 - missed)


def _all_elsewhere(candidates: int, own: int, topk: int) -> float:
    """Return the probability that none of ``topk`` different experts is one of a part's own."""
    topk = min(topk, candidates)
    return comb(candidates - own, topk) / comb(candidates, topk)
