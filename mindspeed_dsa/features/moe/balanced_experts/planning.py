"""Planner that chooses the experts whose weights are sent to the ranks with their tokens.

If an expert is moved, its weights are sent to every rank that has tokens for it, and those tokens stay on
their rank. The expert's own rank computes its own tokens as before. All ranks compute the same plan from the
same counts: sums of integers in float64 are exact in any order, and the rest is elementwise. The costs depend
on rates, which are options or measured once per process group.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.moe.balanced_experts.feature import Options
from mindspeed_dsa.features.moe.experts import SingleExperts
from mindspeed_dsa.megatron.measured import slowest, timed
from mindspeed_dsa.parallel.names import named

Floats = npt.NDArray[np.float64]

_CANDIDATES = 16
"""Largest number of experts considered for a move. With up to 16 experts all are considered."""
_WIDTH = 128
"""Beam width: subsets of each size kept for extension. 560 subsets of 3 out of 16 come from 120 pairs."""
_GAIN = 0.97
"""Move experts only if the predicted time falls below this fraction; smaller gains are prediction error."""
_TRANSFERS = 4
"""Transfers of a row that leaves its rank: dispatch and combine, in forward and in backward."""
_BACKWARD = 2.0
"""Cost of a row's backward (input and weight gradients) relative to its forward."""


@dataclass(frozen=True)
class Costs:
    """Time per unit of work, in seconds. A row is one token copy, routed to one expert.

    Attributes:
        row: time of the forward of one row through one expert.
        token: time to transfer one row over a rank's link, one way.
        weights: time to transfer one expert's weights over a rank's link.
        gradients: time to transfer one expert's gradients over a rank's link.
        call: fixed forward time of running one more expert, in addition to its rows.
    """

    row: float
    token: float
    weights: float
    gradients: float
    call: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Experts to move, and the predicted times.

    Attributes:
        experts: numbers of the moved experts among all experts, ascending.
        before: predicted forward plus backward time of the routed experts if nothing is moved, in seconds.
        after: predicted forward plus backward time with this plan, in seconds.
        rows: number of rows that each rank computes with this plan, ``[ranks]``.
    """

    experts: tuple[int, ...]
    before: float
    after: float
    rows: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """Largest number of rows on a rank, divided by the mean over ranks."""
        total = sum(self.rows)
        return max(self.rows) * len(self.rows) / total if total else 1.0


class _Problem:
    """Model of the layer's time as a function of the set of moved experts.

    The time depends on six counts per rank: rows computed by its own experts, rows computed with received
    weights, rows sent, rows received, weights sent, and weights received. Each moved expert adds a constant
    to these counts, so a set of experts is evaluated by a sum.
    """

    def __init__(self, counts: npt.NDArray[np.int64], costs: Costs, limit: int) -> None:
        ranks, experts = counts.shape
        self.costs, self.ranks = costs, ranks
        # 8 experts on 4 ranks: owner = 0 0 1 1 2 2 3 3.
        owner = np.arange(experts) // (experts // ranks)
        at_home = owner[None, :] == np.arange(ranks)[:, None]  # [ranks, experts]
        away = np.where(at_home, 0, counts)  # [ranks, experts]: rows for others' experts
        remote = away.sum(axis=0)  # [experts]
        load = np.where(at_home, counts.sum(axis=0), 0).sum(axis=1)  # [ranks]
        none = np.zeros(ranks)
        arriving = np.where(at_home, remote, 0)  # [ranks, experts]
        # The six sums without any move: no rows for others at home, no weights sent or received.
        self.base: Floats = np.concatenate([load, none, away.sum(axis=1), arriving.sum(axis=1), none, none])
        # Rows by which the expert's rank exceeds the mean; moving more of the expert's rows does not help.
        excess = np.maximum(load[owner] - load.sum() // ranks, 0)
        # Most rows worth moving first; ties go to more remote rows, then to lower numbers.
        order = sorted(range(experts), key=lambda e: (-min(remote[e], excess[e]), -remote[e], e))
        self.candidates = sorted(e for e in order[:_CANDIDATES] if remote[e])
        moved = self.candidates
        # [ranks, experts]: 1 where the rank would receive the expert's weights.
        borrowers = (away > 0).astype(np.int64)
        # Change of the six sums when an expert moves: other ranks compute their own rows, and the owner sends
        # each of them a copy of the weights.
        self.change: Floats = np.concatenate(
            [-arriving, away, -away, -arriving, np.where(at_home, borrowers.sum(axis=0), 0), borrowers]
        )[:, moved].T.astype(np.float64)  # [candidates, 6 * ranks]
        self.limit = min(limit, len(moved))
        self.fewest_borrowers = min((int(borrowers[:, expert].sum()) for expert in moved), default=0)

    def seconds(self, chosen: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
        """Predict the time of each set of moved experts, and each rank's rows.

        Args:
            chosen: mask of the candidates in each set, ``[sets, candidates]``.

        Returns:
            Seconds ``[sets]``, and number of rows ``[sets, ranks]``.
        """
        sums = self.base + chosen.astype(np.float64) @ self.change
        cold, hot, leave, arrive, sent, received = np.split(sums, 6, axis=1)
        tokens = np.maximum(leave, arrive).max(axis=1) * (_TRANSFERS * self.costs.token)
        # The experts of dispatched tokens hide the weights in forward and the gradients in backward.
        weights = np.maximum(sent, received).max(axis=1, keepdims=True)
        moved = hot * self.costs.row + received * self.costs.call
        forward = np.maximum(cold * self.costs.row, weights * self.costs.weights) + moved
        row = _BACKWARD * self.costs.row
        backward = np.maximum(cold * row, weights * self.costs.gradients) + _BACKWARD * moved
        return forward.max(axis=1) + backward.max(axis=1) + tokens, cold + hot


def choose(counts: Any, costs: Costs, limit: int) -> Plan:
    """Choose the best set of at most ``limit`` experts to move; empty if moving does not save time.

    Among equal sets, prefers fewer experts, then lower expert numbers.

    Args:
        counts: number of rows that each rank has for each expert, integers ``[ranks, experts]``. Experts are
            assigned to the ranks in order, the same number per rank.
        costs: seconds per unit of work.
        limit: largest number of experts to move.
    """
    problem = _Problem(np.asarray(counts, dtype=np.int64), costs, limit)
    none = np.zeros((1, len(problem.candidates)), dtype=np.bool_)
    seconds, rows = problem.seconds(none)
    before = float(seconds[0])
    best = (before, none[0], rows[0])
    # Cheap lower bound: perfect balance, or the transfers of the expert with the fewest receivers. The
    # search takes long for many ranks, so skip it where even this bound does not pay.
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
    """Run a beam search over set sizes: extend the best sets of each size by one expert."""
    count = len(problem.candidates)
    bits = 1 << np.arange(count - 1, -1, -1)  # the first candidate is the highest bit
    subsets = np.zeros(1, dtype=np.int64)
    for _ in range(problem.limit):
        # A subset is an int with one bit per candidate.
        free = (subsets[:, None] & bits) == 0
        # Descending order: of two equal subsets the one with the lower expert numbers comes first.
        subsets = np.unique((subsets[:, None] | bits)[free])[::-1]
        subset_masks = (subsets[:, None] & bits) != 0
        seconds, rows = problem.seconds(subset_masks)
        order = np.argsort(seconds, kind="stable")[:_WIDTH]
        if seconds[order[0]] < best[0]:
            best = (float(seconds[order[0]]), subset_masks[order[0]], rows[order[0]])
        subsets = subsets[order]
    return best


# -- chains ----------------------------------------------------------------------------------------


def chain_of(owner: int, receivers: Sequence[int], nodes: Sequence[int]) -> tuple[int, ...]:
    """Return an expert's receivers in the order in which they pass its weights on.

    Ranks of the owner's node come first, then node by node, so that each network is crossed once.

    Args:
        owner: rank that sends first.
        receivers: ranks that receive the weights, in any order.
        nodes: node number of each rank, see :func:`nodes_of`.
    """
    # Owner on node 1 of 0 to 3: nodes 1, 2, 3, 0.
    count = max(nodes) + 1
    return tuple(sorted(receivers, key=lambda rank: ((nodes[rank] - nodes[owner]) % count, rank)))


def nodes_of(group: Any, context: Context[Options]) -> tuple[int, ...]:
    """Return each rank's node number, from 0 in rank order. The first call is collective over the group.

    Args:
        group: expert parallel process group.
        context: context of the feature.
    """
    known = context.state(Groups).nodes
    if group not in known:
        # 63 bits of the host's name; equal numbers of different hosts would only make chains slower.
        name = int.from_bytes(hashlib.sha256(socket.gethostname().encode()).digest()[:8], "big") >> 1
        own = torch.tensor([name], dtype=torch.int64, device=platforms.current().device)
        names = own.new_empty(dist.get_world_size(group))
        with named("nodes of ranks"):
            dist.all_gather_into_tensor(names, own, group=group)
        numbers: dict[int, int] = {}
        known[group] = tuple(numbers.setdefault(name, len(numbers)) for name in names.tolist())
    return known[group]


# -- rates -----------------------------------------------------------------------------------------

_ROWS = 512
_BYTES = 4 << 20
_ROUNDS = 3


@dataclass(frozen=True)
class Rates:
    """Speed of the slowest rank.

    Attributes:
        matmul: FLOP/s of an expert's matmuls.
        link: bytes per second over a rank's link in one direction.
        call: fixed seconds per additional expert call.
        message: fixed seconds per additional message.
    """

    matmul: float
    link: float
    call: float = 0.0
    message: float = 0.0

    def costs(self, shapes: Sequence[torch.Size], hidden: int, dtype: torch.dtype) -> Costs:
        """Return the costs for experts with weights of these shapes and tokens of ``hidden`` elements."""
        # Per row: 2 FLOP per weight, and 7168 x 2 bytes = 14 KiB on the link for hidden size 7168 in bf16.
        numel = sum(shape.numel() for shape in shapes)
        # Gradients are sent in fp32 or wider, see WeightTransfer.send_gradients.
        wide = torch.promote_types(dtype, torch.float32).itemsize
        latency = len(shapes) * self.message
        return Costs(
            row=2 * numel / self.matmul,
            token=hidden * dtype.itemsize / self.link,
            weights=numel * dtype.itemsize / self.link + latency,
            gradients=numel * wide / self.link + latency,
            call=self.call,
        )


class Groups:
    """Facts about the session's expert parallel groups.

    Attributes:
        rates: measured rates by group.
        nodes: node number of each rank by group.
    """

    def __init__(self, context: Context[Options]) -> None:
        self.rates: WeakKeyDictionary[Any, Rates] = WeakKeyDictionary()
        self.nodes: WeakKeyDictionary[Any, tuple[int, ...]] = WeakKeyDictionary()


def rates_of(experts: SingleExperts, hidden: int, group: Any, context: Context[Options]) -> Rates:
    """Return the rates from the options, or measure them. The first call is collective over the group.

    Args:
        experts: local experts of a layer, all of one size.
        hidden: hidden size.
        group: expert parallel process group.
        context: context of the feature, whose options may give one or both rates.
    """
    options, measured = context.options, context.state(Groups).rates
    if options.matmul_rate is not None and options.link_rate is not None:
        return Rates(options.matmul_rate * 1e12, options.link_rate * 1e9)
    if group not in measured:
        measured[group] = _measure(experts, hidden, group)
        context.log.info(
            "measured %.3g TFLOP/s of experts and %.3g GB/s of a link between %d ranks",
            measured[group].matmul / 1e12,
            measured[group].link / 1e9,
            dist.get_world_size(group),
            ranks="stage",
        )
    rates = measured[group]
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
        # Each rank sends to the next: both directions of every link are busy, as in a token dispatch.
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        data = torch.zeros(size, dtype=torch.uint8, device=weights[0].device)
        received = torch.empty_like(data)
        to, sender = ([size * (other == (rank + step) % ranks) for other in range(ranks)] for step in (1, -1))
        return _fastest(lambda: dist.all_to_all_single(received, data, sender, to, group=group), group)

    # One row and one byte per rank measure the fixed costs of a call and of a message.
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
    """Return the time of this rank's fastest repetition of ``work``, in seconds. Collective."""
    return min(timed(work, group) for _ in range(_ROUNDS))
