"""Choice of the experts whose weights travel to tokens, so that the busiest rank is done first.

Moving an expert means that its weights go to every rank that has tokens for it, and those tokens stay where
they are; tokens of the expert's own rank are computed there as before. All ranks plan from the same counts
and come to the same plan: counts are added exactly, whatever the order (integers in float64), and the rest
is done element by element. Costs follow from rates, which are given or measured once for a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from mindspeed_dsa.features.moe.balanced_experts.feature import Options
from mindspeed_dsa.features.moe.experts import SingleExperts
from mindspeed_dsa.log import Log
from mindspeed_dsa.megatron.measured import slowest, timed

Floats = npt.NDArray[np.float64]

_CANDIDATES = 16
"""Experts that may be moved; up to 16 experts in all every one of them may."""
_WIDTH = 128
"""Subsets of each size that are extended by one more expert; three out of 16 are searched completely."""
_GAIN = 0.97
"""Experts are moved only if that takes less than this fraction of the time: the prediction is no better."""
_TRANSFERS = 4
"""Transfers of a row that leaves its rank: dispatch and combine, forward and backward."""
_BACKWARD = 2.0
"""A row's backward, gradients of input and weights, for each forward."""


@dataclass(frozen=True)
class Costs:
    """Costs in seconds.

    Attributes:
        row: one row through one expert, forward.
        token: one row on a rank's link, once.
        weights: one expert's weights on a rank's link.
        gradients: one expert's gradients on a rank's link.
        call: one more expert that a rank runs, forward, beside the rows.
    """

    row: float
    token: float
    weights: float
    gradients: float
    call: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Experts to move, and the effect.

    Attributes:
        experts: that travel, ascending by number among all experts.
        before: predicted seconds of routed experts without moving any, forward and backward.
        after: with this plan.
        rows: ``[ranks]``, what each rank computes with this plan.
    """

    experts: tuple[int, ...]
    before: float
    after: float
    rows: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """Rows of the most loaded rank over the mean."""
        total = sum(self.rows)
        return max(self.rows) * len(self.rows) / total if total else 1.0


class _Problem:
    """Effect of moving each candidate; everything is a sum over the moved experts.

    ``sums`` are, one after another and each ``[ranks]``: rows computed for all ranks, rows computed at home
    for others' experts, rows that leave, rows that arrive, weights that leave, weights that arrive.
    """

    def __init__(self, counts: npt.NDArray[np.int64], costs: Costs, limit: int) -> None:
        ranks, experts = counts.shape
        self.costs, self.ranks = costs, ranks
        owner = np.arange(experts) // (experts // ranks)
        at_home = owner[None, :] == np.arange(ranks)[:, None]  # [ranks, experts]
        away = np.where(at_home, 0, counts)  # [ranks, experts]: rows for others' experts
        remote = away.sum(axis=0)  # [experts]
        load = np.where(at_home, counts.sum(axis=0), 0).sum(axis=1)  # [ranks]
        none = np.zeros(ranks)
        arriving = np.where(at_home, remote, 0)  # [ranks, experts]
        self.base: Floats = np.concatenate([load, none, away.sum(axis=1), arriving.sum(axis=1), none, none])
        excess = np.maximum(load[owner] - load.sum() // ranks, 0)
        order = sorted(range(experts), key=lambda e: (-min(remote[e], excess[e]), -remote[e], e))
        self.candidates = sorted(e for e in order[:_CANDIDATES] if remote[e])
        moved = self.candidates
        borrowers = (away > 0).astype(np.int64)
        self.change: Floats = np.concatenate(
            [-arriving, away, -away, -arriving, np.where(at_home, borrowers.sum(axis=0), 0), borrowers]
        )[:, moved].T.astype(np.float64)  # [candidates, 6 * ranks]
        self.limit = min(limit, len(moved))
        self.fewest_borrowers = min((int(borrowers[:, expert].sum()) for expert in moved), default=0)

    def seconds(self, chosen: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
        """Predict the time of each subset, and the rows of all ranks.

        Args:
            chosen: ``[subsets, candidates]``.

        Returns:
            ``[subsets]`` and ``[subsets, ranks]``.
        """
        sums = self.base + chosen.astype(np.float64) @ self.change
        cold, hot, leave, arrive, sent, received = np.split(sums, 6, axis=1)
        tokens = np.maximum(leave, arrive).max(axis=1) * (_TRANSFERS * self.costs.token)
        # Weights travel while cold experts compute, and their gradients while those run backward.
        weights = np.maximum(sent, received).max(axis=1, keepdims=True)
        moved = hot * self.costs.row + received * self.costs.call
        forward = np.maximum(cold * self.costs.row, weights * self.costs.weights) + moved
        row = _BACKWARD * self.costs.row
        backward = np.maximum(cold * row, weights * self.costs.gradients) + _BACKWARD * moved
        return forward.max(axis=1) + backward.max(axis=1) + tokens, cold + hot


def choose(counts: Any, costs: Costs, limit: int) -> Plan:
    """Choose the best subset of at most ``limit`` experts, none where moving does not pay.

    Ties go to fewer experts, then to lower numbers.

    Args:
        counts: ``[ranks, experts]``, integers: rows that each rank has for each expert; experts lie on the
            ranks in their order, as many on each.
        costs: what work takes.
        limit: most experts to move.
    """
    problem = _Problem(np.asarray(counts, dtype=np.int64), costs, limit)
    none = np.zeros((1, len(problem.candidates)), dtype=np.bool_)
    seconds, rows = problem.seconds(none)
    before = float(seconds[0])
    best = (before, none[0], rows[0])
    # The best balance, and the weights and gradients of the expert with the fewest borrowers: neither takes
    # long to find out, and a search over many ranks does.
    balanced = float(rows.sum()) / problem.ranks * costs.row * (1 + _BACKWARD)
    sent = problem.fewest_borrowers * (costs.weights + costs.gradients)
    if max(balanced, sent) < _GAIN * before:
        best = _search(problem, best)
    if not best[0] < _GAIN * before:
        best = (before, none[0], rows[0])
    after, chosen, loads = best
    return Plan(
        tuple(expert for expert, moves in zip(problem.candidates, chosen, strict=True) if moves),
        before,
        after,
        tuple(int(load) for load in loads),
    )


def _search(problem: _Problem, best: tuple[float, Any, Any]) -> tuple[float, Any, Any]:
    """Search subsets by size; of each size the best ones are extended by one more expert."""
    count = len(problem.candidates)
    bits = 1 << np.arange(count - 1, -1, -1)  # the first candidate is the highest bit
    subsets = np.zeros(1, dtype=np.int64)
    for _ in range(problem.limit):
        free = (subsets[:, None] & bits) == 0
        # Descending: of two equal ones the lower expert numbers come first.
        subsets = np.unique((subsets[:, None] | bits)[free])[::-1]
        chosen = (subsets[:, None] & bits) != 0
        seconds, rows = problem.seconds(chosen)
        order = np.argsort(seconds, kind="stable")[:_WIDTH]
        if seconds[order[0]] < best[0]:
            best = (float(seconds[order[0]]), chosen[order[0]], rows[order[0]])
        subsets = subsets[order]
    return best


# -- rates -----------------------------------------------------------------------------------------

_ROWS = 512
_BYTES = 4 << 20
_ROUNDS = 3


@dataclass(frozen=True)
class Rates:
    """Speed of the slowest rank.

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
        """Return costs for experts with weights of these shapes and rows of ``hidden`` elements."""
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
    """Return rates as given, or measured; a collective call of all ranks of the group the first time.

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
    rates = _measured[group]
    return replace(
        rates,
        matmul=rates.matmul if options.matmul_rate is None else options.matmul_rate * 1e12,
        link=rates.link if options.link_rate is None else options.link_rate * 1e9,
    )


@torch.no_grad()
def _measure(experts: SingleExperts, hidden: int, group: Any) -> Rates:
    weights = [weight.of(weight.parameter.detach()) for weight in experts.expert_weights(0)]

    def run(count: int) -> float:
        rows = weights[0].new_full((count, hidden), 0.01)
        return _fastest(lambda: experts.run_expert(weights, rows, rows.new_ones(count)), group)

    def send(size: int) -> float:
        # All ranks send to the next one, so each link is used in both directions, as tokens use it.
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        data = torch.zeros(size, dtype=torch.uint8, device=weights[0].device)
        received = torch.empty_like(data)
        to, sender = ([size * (other == (rank + step) % ranks) for other in range(ranks)] for step in (1, -1))
        return _fastest(lambda: dist.all_to_all_single(received, data, sender, to, group=group), group)

    seconds = {"rows": run(_ROWS), "bytes": send(_BYTES), "call": run(1), "message": send(1)}
    seconds = slowest(seconds, group)
    numel = sum(weight.numel() for weight in weights)
    return Rates(
        matmul=2 * numel * _ROWS / seconds["rows"],
        link=_BYTES / seconds["bytes"],
        call=seconds["call"],
        message=seconds["message"],
    )


def _fastest(work: Callable[[], object], group: Any) -> float:
    """Return the seconds of this rank's fastest round; all ranks of the group call this."""
    return min(timed(work, group) for _ in range(_ROUNDS))
