"""How fast this group's ranks compute and send, measured once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from mindspeed_dsa import platforms
from mindspeed_dsa.features.moe.balanced_experts.options import Options
from mindspeed_dsa.features.moe.balanced_experts.planning import Costs
from mindspeed_dsa.integration.experts import SingleExperts
from mindspeed_dsa.log import Log

_ROWS = 512
_BYTES = 4 << 20
_ROUNDS = 3


@dataclass(frozen=True)
class Rates:
    """FLOP/s of an expert's matmuls, and bytes per second of a link in one direction, of the slowest rank."""

    matmul: float
    link: float

    def costs(self, numel: int, hidden: int, dtype: torch.dtype) -> Costs:
        """What work on an expert of ``numel`` weights and rows of ``hidden`` elements takes."""
        wide = torch.promote_types(dtype, torch.float32).itemsize
        return Costs(
            row=2 * numel / self.matmul,
            token=hidden * dtype.itemsize / self.link,
            weights=numel * dtype.itemsize / self.link,
            gradients=numel * wide / self.link,
        )


_measured: WeakKeyDictionary[Any, Rates] = WeakKeyDictionary()
"""By process group."""


def rates_of(experts: SingleExperts, hidden: int, group: Any, options: Options, log: Log) -> Rates:
    """Rates as given, or measured; a collective call of all ranks of the group the first time.

    Args:
        experts: of a layer, all of one size.
        hidden: elements of a row.
        group: expert parallel ranks.
        options: with the rates that are given.
        log: gets the measured rates.
    """
    if options.matmul_rate is not None and options.link_rate is not None:
        return Rates(options.matmul_rate * 1e12, options.link_rate * 1e9)
    if group not in _measured:
        _measured[group] = _measure(experts, hidden, group)
        log.info(
            "measured %.3g TFLOP/s of experts and %.3g GB/s of a link between %d ranks",
            _measured[group].matmul / 1e12,
            _measured[group].link / 1e9,
            dist.get_world_size(group),
            ranks="stage",
        )
    found = _measured[group]
    return Rates(
        found.matmul if options.matmul_rate is None else options.matmul_rate * 1e12,
        found.link if options.link_rate is None else options.link_rate * 1e9,
    )


@torch.no_grad()
def _measure(experts: SingleExperts, hidden: int, group: Any) -> Rates:
    weights = [place.of(place.parameter.detach()) for place in experts.expert_weights(0)]
    rows = weights[0].new_full((_ROWS, hidden), 0.01)
    probs = rows.new_ones(_ROWS)
    seconds = _slowest(lambda: experts.run_expert(weights, rows, probs), group)
    matmul = 2 * sum(weight.numel() for weight in weights) * _ROWS / seconds
    # All ranks send to the next one, so each link is used in both directions, as when tokens are dispatched.
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    data = torch.zeros(_BYTES, dtype=torch.uint8, device=rows.device)
    received = torch.empty_like(data)
    to, sender = ([_BYTES * (other == (rank + step) % ranks) for other in range(ranks)] for step in (1, -1))
    seconds = _slowest(lambda: dist.all_to_all_single(received, data, sender, to, group=group), group)
    return Rates(matmul, _BYTES / seconds)


def _slowest(work: Callable[[], object], group: Any) -> float:
    """Seconds of the slowest rank's fastest round, the same on all ranks."""
    platform = platforms.current()
    fastest = float("inf")
    for _ in range(_ROUNDS):
        dist.all_reduce(torch.zeros(1, device=platform.device), group=group)  # all ranks start together
        platform.synchronize()
        start = time.perf_counter()
        work()
        platform.synchronize()
        fastest = min(fastest, time.perf_counter() - start)
    found = torch.tensor([fastest], dtype=torch.float64, device=platform.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return float(found.item())
