"""How fast this group's ranks compute and send, measured once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from mindspeed_dsa.features.moe.balanced_experts.feature import Options
from mindspeed_dsa.features.moe.balanced_experts.planning import Costs
from mindspeed_dsa.log import Log
from mindspeed_dsa.megatron.experts import SingleExperts
from mindspeed_dsa.megatron.measured import slowest, timed

_ROWS = 512
_BYTES = 4 << 20
_ROUNDS = 3


@dataclass(frozen=True)
class Rates:
    """Of the slowest rank.

    Attributes:
        matmul: FLOP/s of an expert's matmuls.
        link: bytes per second of a link in one direction.
        call: seconds that one more expert takes beside its rows.
        message: seconds that one more message takes beside its bytes.
    """

    matmul: float
    link: float
    call: float = 0.0
    message: float = 0.0

    def costs(self, shapes: Sequence[torch.Size], hidden: int, dtype: torch.dtype) -> Costs:
        """What work takes on an expert with weights of these shapes, and on rows of ``hidden`` elements."""
        numel = sum(shape.numel() for shape in shapes)
        wide = torch.promote_types(dtype, torch.float32).itemsize
        latency = len(shapes) * self.message
        return Costs(
            row=2 * numel / self.matmul,
            token=hidden * dtype.itemsize / self.link,
            weights=numel * dtype.itemsize / self.link + latency,
            gradients=numel * wide / self.link + latency,
            call=self.call,
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
    return replace(
        found,
        matmul=found.matmul if options.matmul_rate is None else options.matmul_rate * 1e12,
        link=found.link if options.link_rate is None else options.link_rate * 1e9,
    )


@torch.no_grad()
def _measure(experts: SingleExperts, hidden: int, group: Any) -> Rates:
    weights = [place.of(place.parameter.detach()) for place in experts.expert_weights(0)]

    def run(count: int) -> float:
        rows = weights[0].new_full((count, hidden), 0.01)
        return _slowest(lambda: experts.run_expert(weights, rows, rows.new_ones(count)), group)

    def send(size: int) -> float:
        # All ranks send to the next one, so each link is used in both directions, as tokens use it.
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        data = torch.zeros(size, dtype=torch.uint8, device=weights[0].device)
        received = torch.empty_like(data)
        to, sender = ([size * (other == (rank + step) % ranks) for other in range(ranks)] for step in (1, -1))
        return _slowest(lambda: dist.all_to_all_single(received, data, sender, to, group=group), group)

    numel = sum(weight.numel() for weight in weights)
    return Rates(
        matmul=2 * numel * _ROWS / run(_ROWS), link=_BYTES / send(_BYTES), call=run(1), message=send(1)
    )


def _slowest(work: Callable[[], object], group: Any) -> float:
    """Seconds of the slowest rank's fastest round, the same on all ranks."""
    return slowest({"": min(timed(work, group) for _ in range(_ROUNDS))}, group)[""]
