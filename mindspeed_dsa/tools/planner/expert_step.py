"""Forward and backward of one layer's routed experts on simulated links, rank by rank, with moved experts.

The weights of a moved expert pass along a chain of ranks in pieces, and its gradients come back along it.
Each rank has two links, one inside its node and one to other nodes. A link carries one piece after the other,
the experts in turn. Tokens are sent before the weights, and after the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mindspeed_dsa.features.moe.balanced_experts.chains import pieces_of
from mindspeed_dsa.features.moe.balanced_experts.planning import Plan, Rates, chain_of, choose
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.schedule.events import Event, Kind, Schedule
from mindspeed_dsa.schedule.simulate import Span, Timeline
from mindspeed_dsa.tools.planner.devices import Device

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

_MESSAGE = 10e-6
"""Assumed seconds that a message takes in addition to its bytes."""
_SAMPLE = 4096
"""Tokens of the simulated router that give the experts' popularity."""
_NEAR = 0.1


@dataclass(frozen=True)
class Layer:
    """Sizes of one layer's routed experts, and of one microbatch.

    Attributes:
        ranks: number of expert parallel ranks.
        experts: number of experts, a multiple of ``ranks``.
        topk: experts per token.
        hidden: hidden size.
        width: hidden size of an expert.
        tokens: tokens of each rank.
    """

    ranks: int
    experts: int = 256
    topk: int = 8
    hidden: int = 7168
    width: int = 2048
    tokens: int = 4096

    def __post_init__(self) -> None:
        if self.ranks < 2 or self.experts % self.ranks:
            raise SettingsError(
                f"schedule: {self.experts} experts cannot be spread over {self.ranks} ranks; give a "
                "number of ranks from 2 that divides the number of experts"
            )
        if not 1 <= self.topk <= self.experts:
            raise SettingsError(f"schedule: a token cannot choose {self.topk} of {self.experts} experts")
        if (least := min(self.hidden, self.width, self.tokens)) < 1:
            raise SettingsError(
                f"schedule: a layer with {least} for --hidden-size, --moe-ffn-hidden-size or --tokens has no "
                "work; give at least 1"
            )

    @property
    def shapes(self) -> list[torch.Size]:
        """Shapes of one expert's weights, with SwiGLU."""
        return [torch.Size((2 * self.width, self.hidden)), torch.Size((self.hidden, self.width))]

    @property
    def numel(self) -> int:
        """Number of weights of one expert."""
        return sum(shape.numel() for shape in self.shapes)


def popular(layer: Layer, zipf: float) -> list[int]:
    """Return tokens by expert of a router with popularity by Zipf's law, popular experts at random places.

    Args:
        layer: sizes of the layer.
        zipf: exponent; 0 for experts of equal popularity.
    """
    noise = np.random.default_rng(0)
    logits = -zipf * np.log(np.arange(1, layer.experts + 1))
    noise.shuffle(logits)
    # The top k of logits with Gumbel noise are k draws without replacement.
    noisy = logits + noise.gumbel(size=(_SAMPLE, layer.experts))
    chosen = np.argpartition(-noisy, layer.topk - 1, axis=1)[:, : layer.topk]
    return [int(tokens) for tokens in np.bincount(chosen.ravel(), minlength=layer.experts)]


def routed(layer: Layer, loads: Sequence[int], seed: int = 0) -> Counts:
    """Draw the rows of each rank for each expert, ``[ranks, experts]``, from tokens by expert."""
    if len(loads) != layer.experts or not sum(loads):
        raise SettingsError(
            f"schedule: the record has {len(loads)} experts with {sum(loads)} tokens, and the layer "
            f"{layer.experts} experts; give --num-experts {len(loads)}, or the record of this model"
        )
    shares = np.asarray(loads, dtype=np.float64) / sum(loads)
    drawn = np.random.default_rng(seed).multinomial(layer.tokens * layer.topk, shares, size=layer.ranks)
    return drawn.astype(np.int64)


def imbalanced(layer: Layer, imbalance: float) -> Counts:
    """Draw rows ``[ranks, experts]`` with the Zipf exponent that gives an imbalance of the ranks.

    Args:
        layer: sizes of the layer.
        imbalance: rows of the most loaded rank over the mean.

    Raises:
        SettingsError: no exponent up to 2 gives this imbalance.
    """
    low, high = 0.0, 2.0
    for _ in range(10):
        zipf = (low + high) / 2
        counts = routed(layer, popular(layer, zipf))
        drawn = imbalance_of(counts)
        low, high = (zipf, high) if drawn < imbalance else (low, zipf)
    if abs(drawn / imbalance - 1) > _NEAR:
        raise SettingsError(
            f"schedule: --imbalance {imbalance:g}: loads by Zipf's law have {drawn:.2f} on {layer.ranks} "
            "ranks; give a number nearer to that, or recorded loads"
        )
    return counts


def imbalance_of(counts: Counts) -> float:
    """Return the rows of the most loaded rank over the mean, for rows ``[ranks, experts]``."""
    loads = counts.sum(axis=0).reshape(counts.shape[0], -1).sum(axis=1)
    return float(loads.max() / loads.mean())


@dataclass(frozen=True)
class Links:
    """Links of ranks that are numbered node by node.

    Attributes:
        node: number of ranks per node.
        inside: bytes per second between two ranks of a node.
        outside: bytes per second between two nodes, per rank.
        message: additional seconds of each message.
    """

    node: int
    inside: float
    outside: float
    message: float = _MESSAGE

    @classmethod
    def of(cls, device: Device) -> Links:
        """Return a device's links, at the rates that collectives reach."""
        return cls(device.node, device.link * device.linking * 1e9, device.network * device.networking * 1e9)

    def nodes(self, ranks: int) -> list[int]:
        """Return each rank's node number."""
        return [rank // self.node for rank in range(ranks)]

    def rates(self, matmul: float, ranks: int) -> Rates:
        """Return the rates that the feature would measure with these links.

        Args:
            matmul: FLOP/s of an expert's matmuls.
            ranks: number of ranks.
        """
        beyond = max(0, ranks - self.node) / (ranks - 1)
        # An all-to-all uses both links at once; the slowest link of a chain decides.
        link = 1 / max(beyond / self.outside, (1 - beyond) / self.inside)
        chain = self.outside if beyond else self.inside
        return Rates(matmul, link, chain, self.inside, tuple(self.nodes(ranks)), message=self.message)


@dataclass(frozen=True)
class Step:
    """Simulated forward and backward of one layer's routed experts.

    Attributes:
        plan: experts that were moved.
        timeline: spans of each rank, in seconds.
        exposed: seconds in forward and backward in which the last rank waits for weights or gradients.
    """

    plan: Plan
    timeline: Timeline
    exposed: float

    @property
    def seconds(self) -> float:
        """Length of forward and backward."""
        return self.timeline.step_time

    @property
    def in_milliseconds(self) -> Timeline:
        """Timeline with times in milliseconds."""
        spans = (
            tuple(replace(span, start=1e3 * span.start, end=1e3 * span.end) for span in rank)
            for rank in self.timeline.ranks
        )
        return replace(self.timeline, ranks=tuple(spans))

    def record(self) -> dict[str, Any]:
        """Return the figures as a dict for JSON."""
        return {
            "name": self.timeline.schedule.name,
            "milliseconds": 1e3 * self.seconds,
            "predicted_milliseconds": 1e3 * self.plan.after,
            "exposed_milliseconds": 1e3 * self.exposed,
            "imbalance": self.plan.imbalance,
            "moved": list(self.plan.experts),
        }


def compare(layer: Layer, counts: Counts, matmul: float, links: Links, limit: int | None) -> list[Step]:
    """Simulate the layer without moved experts, and with the experts that the feature would move.

    Args:
        layer: sizes of the layer, in bf16.
        counts: rows of each rank for each expert, ``[ranks, experts]``.
        matmul: FLOP/s of an expert's matmuls.
        links: links of the ranks.
        limit: most experts to move, at least 1; ``None`` for as many as pay.

    Raises:
        SettingsError: the limit is below 1.
    """
    if limit is not None and limit < 1:
        raise SettingsError(
            f"schedule: --balanced-moe-hot-expert-num {limit}: give at least 1, or omit it for as many as pay"
        )
    costs = links.rates(matmul, layer.ranks).costs(layer.shapes, layer.hidden, torch.bfloat16)
    plan = choose(counts, costs, limit)
    nothing = choose(counts, costs, 0)
    return [
        _Simulation(layer, counts, each, costs.row, links).run(name)
        for name, each in (("stock", nothing), ("balanced-moe-experts", plan))
    ]


def table(steps: Sequence[Step]) -> list[tuple[str, ...]]:
    """Format steps as rows of a text table, the header first."""
    head = ("experts", "step [ms]", "predicted [ms]", "waits for weights [ms]", "imbalance", "moved")
    return [
        head,
        *(
            (
                step.timeline.schedule.name,
                f"{1e3 * step.seconds:.1f}",
                f"{1e3 * step.plan.after:.1f}",
                f"{1e3 * step.exposed:.1f}",
                f"{step.plan.imbalance:.2f}",
                str(len(step.plan.experts)),
            )
            for step in steps
        ),
    ]


class _Simulation:
    def __init__(self, layer: Layer, counts: Counts, plan: Plan, row: float, links: Links) -> None:
        self._layer, self._links, self._plan = layer, links, plan
        ranks = layer.ranks
        owner = np.arange(layer.experts) // (layer.experts // ranks)
        moved = np.zeros(layer.experts, dtype=np.bool_)
        moved[list(plan.experts)] = True
        self._hot = np.zeros(ranks)
        travelling = np.zeros((ranks, ranks))  # [from, to]
        for expert in range(layer.experts):
            rows = counts[:, expert].astype(np.float64)
            kept = np.where(np.arange(ranks) == owner[expert], 0, rows) if moved[expert] else 0 * rows
            self._hot += kept * row
            travelling[:, owner[expert]] += rows - kept
        self._cold = travelling.sum(axis=0) * row
        np.fill_diagonal(travelling, 0)
        self._tokens = self._all_to_all(travelling * layer.hidden * torch.bfloat16.itemsize)
        nodes = links.nodes(ranks)
        self._chains = [
            (home, *chain_of(home, [int(r) for r in np.flatnonzero(counts[:, e]) if r != home], nodes))
            for e, home in ((e, int(owner[e])) for e in plan.experts)
        ]

    def _all_to_all(self, nbytes: Floats) -> float:
        """Return the time of the slowest rank's slowest link, for bytes ``[from, to]``."""
        nodes = np.array(self._links.nodes(self._layer.ranks))
        near = nodes[:, None] == nodes[None, :]
        inside, outside = np.where(near, nbytes, 0), np.where(near, 0, nbytes)
        return max(
            float(part.sum(axis=axis).max()) / rate
            for part, rate in ((inside, self._links.inside), (outside, self._links.outside))
            for axis in (0, 1)
        )

    def run(self, name: str) -> Step:
        """Return the step; ``name`` is the title of its timeline."""
        forward, combined, late = self._half(0.0, 1.0, back=False)
        backward, _, later = self._half(combined, 2.0, back=True)
        spans = [[*first, *second] for first, second in zip(forward, backward, strict=True)]
        ranks = tuple(tuple(sorted(each, key=lambda span: span.start)) for each in spans)
        events = tuple(tuple(span.event for span in each) for each in ranks)
        return Step(self._plan, Timeline(Schedule(name, events, 2, 1), ranks), late + later)

    def _half(self, start: float, factor: float, back: bool) -> tuple[list[list[Span]], float, float]:
        """Return the spans of forward or backward, its end, and the time that ranks wait for transfers.

        Args:
            start: time at which the half starts.
            factor: work of a row, relative to forward.
            back: whether it is the backward.
        """
        ranks, computed = self._layer.ranks, start + self._tokens
        cold, hot = factor * self._cold, factor * self._hot
        if back:  # moved experts first, so that their gradients return under the other experts
            hot_start, cold_start = np.full(ranks, computed), computed + hot
            began, ended = self._transfers(cold_start, back)
            done = np.maximum(cold_start + cold, ended)
        else:
            cold_start = np.full(ranks, computed)
            began, ended = self._transfers(cold_start, back)
            hot_start = np.maximum(computed + cold, np.where(hot > 0, ended, 0))
            done = np.maximum(hot_start + hot, ended)
        waits = float(done.max() - (computed + cold + hot).max())
        slowest = float(done.max())
        end = slowest + self._tokens
        first, last = (Kind.COMBINE, Kind.DISPATCH) if back else (Kind.DISPATCH, Kind.COMBINE)
        spans = [
            [
                self._span(first, rank, start, computed, back),
                self._span(Kind.COLD, rank, cold_start[rank], cold_start[rank] + cold[rank], back),
                self._span(Kind.HOT, rank, hot_start[rank], hot_start[rank] + hot[rank], back),
                self._span(Kind.PASSED, rank, began[rank], ended[rank], back),
                self._span(last, rank, slowest, end, back),
            ]
            for rank in range(ranks)
        ]
        return [[span for span in each if span.end > span.start] for each in spans], end, waits

    def _span(self, kind: Kind, rank: int, start: float, end: float, back: bool) -> Span:
        # Experts and weights share a row of the picture, like a pair of a pipeline.
        shares = self._chains and kind in (Kind.COLD, Kind.HOT, Kind.PASSED)
        return Span(Event(kind, int(back), 0, 0 if shares else None), rank, float(start), float(end))

    def _transfers(self, ready: Floats, back: bool) -> tuple[Floats, Floats]:
        """Pass weights along the chains, or gradients back.

        Args:
            ready: time at which each rank's own tensors are complete, ``[ranks]``.
            back: whether gradients come back.

        Returns:
            Start of each rank's first message and end of its last one, ``[ranks]``; ``ready`` without any.
        """
        layer, links = self._layer, self._links
        nbytes = layer.numel * (torch.float32 if back else torch.bfloat16).itemsize
        nodes = np.array(links.nodes(layer.ranks))
        free = np.zeros((2, 2, layer.ranks))  # [sends or receives, inside or outside, ranks]
        began, ended = np.full(layer.ranks, np.inf), ready.copy()
        flows = []
        for chain in self._chains:
            way = np.array(chain[::-1] if back else chain)
            pieces = pieces_of(len(way) - 1, nbytes)
            flows.append((way, pieces, np.full(pieces, ready[way[0]])))
        for turn in range(max((pieces + len(way) for way, pieces, _ in flows), default=0)):
            for way, pieces, there in flows:
                # Rank `place` of a chain sends piece `piece` in round piece + place, as in chains.py.
                piece = np.arange(max(0, turn - len(way) + 2), min(pieces, turn + 1))
                place = turn - piece
                sender, receiver = way[place], way[place + 1]
                outside = (nodes[sender] != nodes[receiver]).astype(np.int64)
                took = nbytes / pieces / np.where(outside, links.outside, links.inside) + links.message
                begin = np.maximum(free[0, outside, sender], free[1, outside, receiver])
                begin = np.maximum(begin, there[piece])
                end = begin + took
                free[0, outside, sender] = free[1, outside, receiver] = end
                began[sender], began[receiver] = (
                    np.minimum(began[sender], begin),
                    np.minimum(began[receiver], begin),
                )
                ended[sender], ended[receiver] = (
                    np.maximum(ended[sender], end),
                    np.maximum(ended[receiver], end),
                )
                # A rank passes gradients on when its own are added.
                there[piece] = np.maximum(end, ready[receiver]) if back else end
        return np.minimum(began, ended), ended
