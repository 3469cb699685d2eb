"""Figures of a timeline: step time, bubbles, hidden communication, activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mindspeed_dsa.schedule.costs import Costs
from mindspeed_dsa.schedule.events import Kind
from mindspeed_dsa.schedule.simulate import Span, Timeline


@dataclass(frozen=True)
class Figures:
    """Figures of one schedule.

    Attributes:
        schedule: its name.
        step_time: in the unit of the costs.
        bubble_fraction: share of ``ranks * step_time`` in which ranks wait.
        hidden: share of all all-to-all that computation hides.
        steady_hidden_mean: share of the pairs' all-to-all that is hidden, mean of the ranks.
        steady_hidden_worst: on the rank where it is smallest; it holds up the others.
        chunks_in_flight: by rank, most forwards whose backward is open.
        peak_memory: by rank, of activations.
    """

    schedule: str
    step_time: float
    bubble_fraction: float
    hidden: float | None
    steady_hidden_mean: float | None
    steady_hidden_worst: float | None
    chunks_in_flight: tuple[int, ...]
    peak_memory: tuple[float, ...]

    def record(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self)


def figures(timeline: Timeline, costs: Costs) -> Figures:
    """Read them off a timeline."""
    by_rank = [_hidden([s for s in spans if s.event.pair is not None]) for spans in timeline.ranks]
    steady = [share for share in by_rank if share is not None]
    busy = sum(_busy(spans) for spans in timeline.ranks)
    return Figures(
        schedule=timeline.schedule.name,
        step_time=timeline.step_time,
        bubble_fraction=1 - busy / (len(timeline.ranks) * timeline.step_time),
        hidden=_hidden([span for spans in timeline.ranks for span in spans]),
        steady_hidden_mean=sum(steady) / len(steady) if steady else None,
        steady_hidden_worst=min(steady) if steady else None,
        chunks_in_flight=tuple(_in_flight(spans) for spans in timeline.ranks),
        peak_memory=tuple(_peak_memory(spans, costs) for spans in timeline.ranks),
    )


def _hidden(spans: Sequence[Span]) -> float | None:
    communication = sum(span.communication for span in spans)
    return sum(span.hidden for span in spans) / communication if communication else None


def _busy(spans: Sequence[Span]) -> float:
    """Time in which a rank does something; the two events of a pair share theirs."""
    return sum(end - start for start, end in {(span.start, span.end) for span in spans})


def _in_flight(spans: Sequence[Span]) -> int:
    now = peak = 0
    for span in spans:
        now += (span.event.kind is Kind.FORWARD) - (span.event.kind is Kind.BACKWARD)
        peak = max(peak, now)
    return peak


def _peak_memory(spans: Sequence[Span], costs: Costs) -> float:
    """Activations at their highest: a list is run in its order, so that order says what is kept."""
    units = {(span.event.kind, span.event.chunk, span.event.microbatch) for span in spans}
    now = peak = 0.0
    for span in spans:
        event = span.event
        recomputed = (Kind.RECOMPUTE, event.chunk, event.microbatch) in units
        split = (Kind.WEIGHT, event.chunk, event.microbatch) in units
        late = costs.weight_activations * costs.activations if split else 0.0
        kept = costs.checkpoint if recomputed else costs.activations
        if event.kind is Kind.FORWARD:
            # A forward without its graph holds one layer's activations at a time, counted in the checkpoint.
            now += kept
        elif event.kind is Kind.RECOMPUTE:
            now += costs.activations
        elif event.kind is Kind.BACKWARD:
            peak = max(peak, now)
            now -= costs.activations - late + (costs.checkpoint if recomputed else 0.0)
        else:
            now -= late
        peak = max(peak, now)
    return peak


def table(rows: Sequence[Figures]) -> list[tuple[str, ...]]:
    """Rows for a text table, with its head."""

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    head = ("schedule", "step", "bubble", "hidden", "steady", "worst rank", "in flight", "peak memory")
    return [
        head,
        *(
            (
                row.schedule,
                f"{row.step_time:g}",
                share(row.bubble_fraction),
                share(row.hidden),
                share(row.steady_hidden_mean),
                share(row.steady_hidden_worst),
                str(max(row.chunks_in_flight)),
                f"{max(row.peak_memory):g}",
            )
            for row in rows
        ),
    ]
