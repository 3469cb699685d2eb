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
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.moe.balanced_experts.chains import Chains, Flow, pieces_of
from mindspeed_dsa.features.moe.balanced_experts.feature import Options
from mindspeed_dsa.features.moe.experts import SingleExperts
from mindspeed_dsa.megatron.measured import slowest, timed
from mindspeed_dsa.parallel.names import named

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

_CANDIDATES = 16
"""Experts by which a set is extended. With up to 16 experts all are tried."""
_WIDTH = 128
"""Beam width with few ranks: 560 sets of 3 out of 16 come from 120 pairs."""
_WORK = 8192
"""Bound of width x candidates x ranks. With 64 ranks the width is 8."""
_EXACT = 62
"""Most experts whose sets are numbered by one bit per expert in an int64."""
_PATIENCE = 4
"""Set sizes without a better set after which the search ends. Two equally loaded ranks need two moves."""
_GAIN = 0.97
"""Move experts only if the predicted time falls below this fraction; smaller gains are prediction error."""
_EACH = 0.0025
"""Share of the time that each moved expert has to save: its weights take memory until the backward."""
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
        weights: time to transfer one expert's weights over a rank's link inside its node.
        gradients: time to transfer one expert's gradients over that link.
        call: fixed forward time of running one more expert, in addition to its rows.
        pieces: pieces in which weights or gradients pass along a chain. A rank gets them one piece's time
            after the rank before it.
        beyond: time over a rank's link to other nodes, relative to the link inside its node; at least 1.
        nodes: node number of each rank, see :func:`nodes_of`; empty for one node.
    """

    row: float
    token: float
    weights: float
    gradients: float
    call: float = 0.0
    pieces: int = 1
    beyond: float = 1.0
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Experts to move, and the predicted times.

    Attributes:
        experts: slots of the moved experts, ascending: positions among the experts of all ranks.
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


@dataclass(frozen=True)
class _Sets:
    """Sets of moved experts, and the work of each rank with each set.

    Attributes:
        moved: mask of the moved experts, ``[sets, experts]``.
        key: number of each set, equal for equal sets, ``[sets]``.
        cold: rows that each rank computes with its own experts, ``[sets, ranks]``.
        hot: rows that it computes with received weights, ``[sets, ranks]``.
        sent: experts that it sends or passes on, inside its node and to others, ``[sets, 2, ranks]``.
        received: experts that it receives, from its node and from others, ``[sets, 2, ranks]``.
        hops: most messages of one chain inside nodes, and between nodes, ``[sets, 2]``.
        seconds: predicted time, ``[sets]``.
    """

    moved: npt.NDArray[np.bool_]
    key: Counts
    cold: Counts
    hot: Counts
    sent: Counts
    received: Counts
    hops: Counts
    seconds: Floats

    def __getitem__(self, sets: Any) -> _Sets:
        """Return the sets of these indices."""
        return _Sets(*(getattr(self, entry.name)[sets] for entry in fields(self)))


class _Problem:
    """Model of the layer's time as a function of the set of moved experts.

    Weights and gradients of a moved expert pass from rank to rank along a chain. So a rank of the chain sends
    at most one copy and receives at most one, however many ranks have tokens for the expert.
    """

    def __init__(self, counts: Counts, costs: Costs) -> None:
        ranks, experts = counts.shape
        self.costs, self.ranks, self.experts = costs, ranks, experts
        numbers = np.arange(experts)
        # 8 experts on 4 ranks: owner = 0 0 1 1 2 2 3 3.
        self.owner = numbers // (experts // ranks)
        away = counts.T.copy()
        away[numbers, self.owner] = 0
        self.away: Counts = away  # [experts, ranks]: rows for others' experts
        self.remote: Counts = away.sum(axis=1)  # [experts]
        at_home = counts[self.owner, numbers].reshape(ranks, -1).sum(axis=1)
        self.load: Counts = at_home + self.remote.reshape(ranks, -1).sum(axis=1)  # [ranks]
        self._at_home, self._leave = at_home, away.sum(axis=0)
        # Ranks of each chain in order, then those without tokens for the expert: [experts, ranks].
        nodes = costs.nodes or (0,) * ranks
        place = _places(nodes)[self.owner]
        chain = np.argsort(np.where(away > 0, place, place + place.size * (place > 0)), axis=1)
        passes = np.arange(1, ranks) <= (away > 0).sum(axis=1)[:, None]
        crosses = (np.diff(np.array(nodes)[chain], axis=1) != 0).astype(np.int64)
        self.sent: Counts = np.zeros((experts, 2, ranks), dtype=np.int64)
        self.received = self.sent.copy()
        self.sent[numbers[:, None], crosses, chain[:, :-1]] = passes
        self.received[numbers[:, None], crosses, chain[:, 1:]] = passes
        self.hops: Counts = self.sent.sum(axis=2)
        # A set's key is the sum of these: one bit per expert, or random numbers for many experts.
        self.key: Counts = np.random.default_rng(0).integers(1, 1 << 62, size=(experts,))
        if experts <= _EXACT:
            self.key = np.ones(experts, dtype=np.int64) << (experts - 1 - numbers)

    def nothing(self) -> _Sets:
        """Return the set without experts."""
        none, zero = np.zeros((1, 2, self.ranks), dtype=np.int64), np.zeros(1, dtype=np.int64)
        moved = np.zeros((1, self.experts), dtype=np.bool_)
        return self._timed(moved, zero, self.load[None, :], none[:, 0], none, none, none[:, :, 0])

    def extended(self, sets: _Sets) -> _Sets:
        """Extend each set by each of its best candidates; equal results are repeated."""
        # Rows by which the expert's rank exceeds the mean; moving more of the expert's rows does not help.
        excess = (sets.cold + sets.hot - self.load.sum() // self.ranks)[:, self.owner]
        worth = np.minimum(self.remote, np.maximum(excess, 0))
        # Most rows worth moving first; ties go to more remote rows, then to lower numbers.
        worth = worth * (self.remote.max() + 1) + self.remote
        worth = np.where(sets.moved, -1, worth)
        candidates = np.argsort(-worth, axis=1, kind="stable")[:, :_CANDIDATES]
        taken = np.take_along_axis(worth, candidates, axis=1) > 0  # not moved already, and with remote rows
        old, place = np.nonzero(taken)
        expert = candidates[old, place]
        rows = np.arange(len(old))
        moved, cold = sets.moved[old], sets.cold[old]
        moved[rows, expert] = True
        cold[rows, self.owner[expert]] -= self.remote[expert]
        return self._timed(
            moved,
            sets.key[old] + self.key[expert],
            cold,
            sets.hot[old] + self.away[expert],
            sets.sent[old] + self.sent[expert],
            sets.received[old] + self.received[expert],
            np.maximum(sets.hops[old], self.hops[expert]),
        )

    def _timed(
        self,
        moved: npt.NDArray[np.bool_],
        key: Counts,
        cold: Counts,
        hot: Counts,
        sent: Counts,
        received: Counts,
        hops: Counts,
    ) -> _Sets:
        costs = self.costs
        rows = np.maximum((self._leave - hot).max(axis=1), (cold - self._at_home).max(axis=1))
        # The unit is one copy's time inside a node. Links inside and between nodes work at the same time.
        links = np.array([1.0, costs.beyond])
        copies = (np.maximum(sent, received).max(axis=2) * links).max(axis=1)
        # The last rank gets each piece later by the hops; the slowest hop is in the copies.
        late = (hops * links).sum(axis=1) - ((hops > 0) * links).max(axis=1)
        copies = copies + late / costs.pieces
        moving = hot * costs.row + received.sum(axis=1) * costs.call
        # The experts of dispatched tokens hide the weights in forward and the gradients in backward.
        forward = np.maximum(cold * costs.row, (copies * costs.weights)[:, None]) + moving
        row = _BACKWARD * costs.row
        backward = np.maximum(cold * row, (copies * costs.gradients)[:, None]) + _BACKWARD * moving
        seconds = forward.max(axis=1) + backward.max(axis=1) + rows * (_TRANSFERS * costs.token)
        return _Sets(moved, key, cold, hot, sent, received, hops, seconds)


def choose(counts: Any, costs: Costs, limit: int | None = None) -> Plan:
    """Choose the best set of experts to move; empty if moving does not save time.

    Among equal sets, prefers fewer experts, then more even rows, then (with up to 62) lower expert numbers.

    Args:
        counts: number of rows that each rank has for each expert, integers ``[ranks, experts]``. Experts are
            assigned to the ranks in order, the same number per rank.
        costs: seconds per unit of work.
        limit: largest number of experts to move; ``None`` for as many as save time.
    """
    problem = _Problem(np.asarray(counts, dtype=np.int64), costs)
    none = problem.nothing()
    before, best = float(none.seconds[0]), none
    # Cheap lower bound: perfect balance, or the transfer of one expert. The search takes long for many
    # ranks, so skip it where even this bound does not pay.
    balanced = float(problem.load.sum()) / problem.ranks * costs.row * (1 + _BACKWARD)
    if max(balanced, costs.weights + costs.gradients) < _GAIN * before:
        best = _search(problem, none, problem.experts if limit is None else limit)
    if not best.seconds[0] < _GAIN * before:
        best = none
    return Plan(
        tuple(int(expert) for expert in np.flatnonzero(best.moved[0])),
        before,
        float(best.seconds[0]),
        tuple(int(rows) for rows in (best.cold + best.hot)[0]),
    )


def _search(problem: _Problem, sets: _Sets, limit: int) -> _Sets:
    """Run a beam search over set sizes: extend the best sets of each size by one expert. Return the best."""
    width = int(np.clip(_WORK // (_CANDIDATES * problem.ranks), 8, _WIDTH))
    saving = _EACH * sets.seconds[0]
    best, least, waited = sets, sets.seconds[0], 0
    for size in range(1, limit + 1):
        sets = problem.extended(sets)
        # Of equal times, the more even rows have the smaller sum of squares; higher keys have lower numbers.
        squares = ((sets.cold + sets.hot) ** 2).sum(axis=1)
        order = np.lexsort((-sets.key, squares, sets.seconds))
        _, first = np.unique(sets.key[order], return_index=True)
        sets = sets[order[np.sort(first)[:width]]]
        if not len(sets.key):
            break
        if sets.seconds[0] + size * saving < least:
            best, least, waited = sets[:1], sets.seconds[0] + size * saving, 0
        elif (waited := waited + 1) == _PATIENCE:
            break
    return best


# -- chains ----------------------------------------------------------------------------------------


def chain_of(owner: int, receivers: Sequence[int], nodes: Sequence[int]) -> tuple[int, ...]:
    """Return an expert's receivers in the order in which they pass its weights on.

    Ranks of the owner's node come first, then node by node, so that each network is crossed once. Chains of
    different owners enter and leave a node at different ranks, each of which has a link to other nodes.

    Args:
        owner: rank that sends first.
        receivers: ranks that receive the weights, in any order.
        nodes: node number of each rank, see :func:`nodes_of`.
    """
    return tuple(sorted(receivers, key=_places(tuple(nodes))[owner].__getitem__))


@lru_cache(maxsize=16)
def _places(nodes: tuple[int, ...]) -> Counts:
    """Return each rank's place in a chain through all ranks, by owner: ``[owners, ranks]``."""
    node, count, ranks = np.array(nodes), max(nodes) + 1, len(nodes)
    own = np.array([nodes[:rank].count(nodes[rank]) for rank in range(ranks)])  # place inside the node
    # Owner 5 of two nodes with 4 ranks: 5 6 7 4, then 1 2 3 0.
    places: Counts = (node - node[:, None]) % count * ranks + (own - own[:, None]) % (own.max() + 1)
    return places


def nodes_of(group: Any, context: Context[Options]) -> tuple[int, ...]:
    """Return each rank's node number, from 0 in rank order. The first call is collective over the group.

    Args:
        group: expert parallel process group.
        context: context of the feature.
    """
    nodes = context.state(Groups).nodes
    if group not in nodes:
        # 63 bits of the host's name; equal numbers of different hosts would only make chains slower.
        name = int.from_bytes(hashlib.sha256(socket.gethostname().encode()).digest()[:8], "big") >> 1
        host = torch.tensor([name], dtype=torch.int64, device=platforms.current().device)
        names = host.new_empty(dist.get_world_size(group))
        with named("nodes of ranks"):
            dist.all_gather_into_tensor(names, host, group=group)
        numbers: dict[int, int] = {}
        nodes[group] = tuple(numbers.setdefault(name, len(numbers)) for name in names.tolist())
    return nodes[group]


# -- rates -----------------------------------------------------------------------------------------

_ROWS = 512
_BYTES = 4 << 20
_CHAIN = 16 << 20
_ROUNDS = 3


@dataclass(frozen=True)
class Rates:
    """Speed of the slowest rank of a group.

    Attributes:
        matmul: FLOP/s of an expert's matmuls.
        link: bytes per second over a rank's link in one direction, in an all-to-all.
        chain: bytes per second that a rank of a chain receives and passes on, with several nodes from one to
            the next.
        inside: the same inside a node.
        nodes: node number of each rank, see :func:`nodes_of`.
        call: fixed seconds per additional expert call.
        message: fixed seconds per additional piece in a chain.
    """

    matmul: float
    link: float
    chain: float
    inside: float
    nodes: tuple[int, ...]
    call: float = 0.0
    message: float = 0.0

    def costs(self, shapes: Sequence[torch.Size], hidden: int, dtype: torch.dtype) -> Costs:
        """Return the costs for experts with weights of these shapes and tokens of ``hidden`` elements."""
        # Per row: 2 FLOP per weight, and 7168 x 2 bytes = 14 KiB on the link for hidden size 7168 in bf16.
        numel = sum(shape.numel() for shape in shapes)
        # Gradients are sent in fp32 or wider, see WeightTransfer.send_gradients.
        wide = torch.promote_types(dtype, torch.float32).itemsize
        pieces = pieces_of(len(self.nodes) - 1, numel * dtype.itemsize)
        latency = pieces * self.message
        return Costs(
            row=2 * numel / self.matmul,
            token=hidden * dtype.itemsize / self.link,
            weights=numel * dtype.itemsize / self.inside + latency,
            gradients=numel * wide / self.inside + latency,
            call=self.call,
            pieces=pieces,
            beyond=max(1.0, self.inside / self.chain),
            nodes=self.nodes,
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
    options, measured, nodes = context.options, context.state(Groups).rates, nodes_of(group, context)
    if options.matmul_rate is not None and options.link_rate is not None:
        link = options.link_rate * 1e9
        return Rates(options.matmul_rate * 1e12, link, link, link, nodes)
    if group not in measured:
        measured[group] = _measure(experts, hidden, group, nodes)
        context.log.info(
            "measured %.3g TFLOP/s of experts; between %d ranks %.3g GB/s of a link, %.3g GB/s along a "
            "chain, %.3g GB/s inside a node",
            measured[group].matmul / 1e12,
            len(nodes),
            measured[group].link / 1e9,
            measured[group].chain / 1e9,
            measured[group].inside / 1e9,
            ranks="stage",
        )
    rates = measured[group]
    if options.matmul_rate is not None:
        return replace(rates, matmul=options.matmul_rate * 1e12)
    if options.link_rate is not None:
        link = options.link_rate * 1e9
        return replace(rates, link=link, chain=link, inside=link)
    return rates


@torch.no_grad()
def _measure(experts: SingleExperts, hidden: int, group: Any, nodes: tuple[int, ...]) -> Rates:
    weights = [weight.of(weight.parameter.detach()) for weight in experts.expert_weights(0)]
    device, rank, ranks = weights[0].device, dist.get_rank(group), dist.get_world_size(group)

    def run(count: int) -> float:
        rows = weights[0].new_full((count, hidden), 0.01)
        return _fastest(lambda: experts.run_expert(weights, rows, rows.new_ones(count)), group)

    def send(size: int) -> float:
        # Each rank sends to the next: both directions of every link are busy, as in a token dispatch.
        data = torch.zeros(size, dtype=torch.uint8, device=device)
        received = torch.empty_like(data)
        to, sender = ([size * (other == (rank + step) % ranks) for other in range(ranks)] for step in (1, -1))
        return _fastest(lambda: dist.all_to_all_single(received, data, sender, to, group=group), group)

    def pass_on(size: int, paths: Sequence[tuple[int, ...]]) -> float:
        flows = [Flow(path, "a measured chain", [size], 1) for path in paths]
        for flow in flows:
            if rank in flow.ranks:
                data = [torch.zeros(size, dtype=torch.uint8, device=device)]
                setattr(flow, "own" if rank == flow.ranks[0] else "received", data)

        def work() -> None:
            chains = Chains(flows, group)
            chains.launch()
            chains.settle()

        return _fastest(work, group)

    # One row and one byte measure the fixed costs of a call and of a message.
    seconds = {"rows": run(_ROWS), "bytes": send(_BYTES), "call": run(1)}
    whole = (0, *chain_of(0, range(1, ranks), nodes))
    parts = [tuple(each for each in whole if nodes[each] == node) for node in range(max(nodes) + 1)]
    longest = max(map(len, parts)) - 1
    seconds |= {"chain": pass_on(_CHAIN, [whole]), "byte": pass_on(1, [whole])}
    # Otherwise all links are alike: one node, or one rank on each.
    if mixed := 0 < longest < ranks - 1:
        seconds["inside"] = pass_on(_CHAIN, [part for part in parts if len(part) > 1])
    seconds = slowest(seconds, group)
    numel = sum(weight.numel() for weight in weights)

    def rate(hops: int, took: float) -> float:
        # With 3 hops and 16 pieces, the last rank has everything after the time of 18 pieces.
        pieces = pieces_of(hops, _CHAIN)
        return _CHAIN * (pieces + hops - 1) / pieces / took

    chain = rate(ranks - 1, seconds["chain"])
    return Rates(
        matmul=2 * numel * _ROWS / seconds["rows"],
        link=_BYTES / seconds["bytes"],
        chain=chain,
        inside=rate(longest, seconds["inside"]) if mixed else chain,
        nodes=nodes,
        call=seconds["call"],
        message=seconds["byte"] / (ranks - 1),
    )


def _fastest(work: Callable[[], object], group: Any) -> float:
    """Return the time of this rank's fastest repetition of ``work``, in seconds. Collective."""
    return min(timed(work, group) for _ in range(_ROUNDS))
