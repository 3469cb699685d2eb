"""Tensor parallel communication overlapped with matmul, on two ranks connected by a slow link."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.linkbed import LinkBed
from benchmarks.registry import Metrics
from benchmarks.tp_overlap.cells import ALLOWED, FIXED, Sizes

RATE = "2gbit"
QUICK = Sizes(rows=128, hidden=128, rounds=1)
_CELLS = "benchmarks.tp_overlap.cells:measure"
_JOB = "benchmarks.tp_overlap.job:measure"
_TRACE = "benchmarks.tp_overlap.trace:record"


def run(device: str, quick: bool = False, link: str = RATE, trace: str | None = None) -> Metrics:
    """Return all metrics of the case; link beds connect processes on the host, for any device.

    Args:
        device: not used.
        quick: tiny problems.
        link: rate of the link.
        trace: file for the trace of one step; an image is written next to it.
    """
    sizes = QUICK if quick else Sizes()
    with LinkBed(2, link) as bed:
        slow = bed.run(_CELLS, sizes=sizes)[0]
        job = bed.run(_JOB, quick=quick)[0]
        inner = slow["pair"]["hidden_inner"][1]
        recorded = bed.run(_TRACE, sizes=sizes, inner=inner) if trace else []
    with LinkBed(2, None) as bed:
        # Measure the same pair as over the link: the gain there must not be lost here.
        loopback = bed.run(_CELLS, sizes=sizes, inner=inner)[0]
    if trace:
        from benchmarks.tp_overlap import picture

        picture.write(recorded, Path(trace), "a column and a row parallel layer")
    for layer, directions in slow["cells"].items():
        for direction, cell in directions.items():
            _say(f"{layer} {direction}: {cell}")
    _say(f"pair, transfer {ratio(slow['pair']['milliseconds']):.2f} of matmul: {slow['pair']}")
    _say(f"pair over loopback: {loopback['pair']}")
    return metrics(link, slow, loopback, job)


def metrics(link: str, slow: Mapping[str, Any], loopback: Mapping[str, Any], job: Metrics) -> Metrics:
    """Convert measured milliseconds to ratios.

    Args:
        link: link's rate.
        slow: result of :func:`benchmarks.tp_overlap.cells.measure` over the link.
        loopback: result of the same function over loopback.
        job: result of :func:`benchmarks.tp_overlap.job.measure` over the link.
    """
    cells, pair, fast = slow["cells"], slow["pair"]["milliseconds"], loopback["pair"]["milliseconds"]
    return {
        "link": link,
        "hidden_fraction": _table(cells, lambda cell: hidden(cell, "overlapped")),
        "hidden_fraction_stock": _table(cells, lambda cell: hidden(cell, "stock")),
        "hidden_fraction_fixed": {
            str(count): _table(cells, lambda cell, count=count: hidden(cell, str(count))) for count in FIXED
        },
        "hidden_fraction_of_chunks": _table(cells, hidden_of_chunks),
        "layer_speedup": pair["stock"] / pair["overlapped"],
        "layer_speedup_fixed": {str(count): pair["stock"] / pair[str(count)] for count in FIXED},
        "loopback_ratio": fast["overlapped"] / fast["stock"],
        "loopback_ratio_fixed": {str(count): fast[str(count)] / fast["stock"] for count in FIXED},
        "reduce_scatter_gain": slow["reduce_scatter"]["torch"] / slow["reduce_scatter"]["platform"],
        "chunks_chosen": _table(cells, lambda cell: cell["chunks"]),
        "chunks_chosen_pair": slow["pair"]["chunks"],
        "chunks_chosen_loopback": loopback["pair"]["chunks"],
        "transfer_in_chunks": _table(cells, in_chunks),
        "transfer_over_matmul": _table(cells, lambda cell: ratio(cell["milliseconds"])),
        "transfer_over_matmul_pair": ratio(pair),
        "m_k_n": _table(cells, lambda cell: " x ".join(map(str, cell["m_k_n"]))),
        "milliseconds": _table(cells, lambda cell: cell["milliseconds"]),
        "milliseconds_pair": pair,
        "milliseconds_reduce_scatter": {
            name: 1e3 * seconds for name, seconds in slow["reduce_scatter"].items()
        },
        "milliseconds_pair_loopback": fast,
        "correctness_deviation": max(slow["deviation"], loopback["deviation"]),
        "job": job,
    }


def hidden(cell: Mapping[str, Any], name: str) -> float | str:
    """Return the hidden fraction of the shorter of transfer and matmul: 1 at best, 0 in sequence.

    Return a sentence if the two do not take about the same time: the fraction is then not meaningful.
    """
    times = cell["milliseconds"]
    return _hidden(times["transfer"], times["matmul"], times[name])


def hidden_of_chunks(cell: Mapping[str, Any]) -> float | str:
    """Return the hidden fraction if the transfer by itself is measured in the overlapped layer's chunks."""
    times = cell["milliseconds"]
    return _hidden(times["transfer in chunks"], times["matmul"], times["overlapped"])


def _hidden(transfer: float, matmul: float, together: float) -> float | str:
    share = transfer / matmul
    if not ALLOWED[0] <= share <= ALLOWED[1]:
        return (
            f"not measured: transfer took {share:.2f} of the matmul's time, not {ALLOWED[0]} to {ALLOWED[1]}"
        )
    return min(1.0, (transfer + matmul - together) / min(transfer, matmul))


def in_chunks(cell: Mapping[str, Any]) -> float:
    """Return the time of a transfer in the overlapped layer's chunks over a transfer in one piece."""
    return cell["milliseconds"]["transfer in chunks"] / cell["milliseconds"]["transfer"]


def ratio(milliseconds: Mapping[str, float]) -> float:
    """Return the time of a transfer over the time of a matmul, each by itself."""
    return milliseconds["transfer"] / milliseconds["matmul"]


def _table(cells: Mapping[str, Any], value: Any) -> dict[str, dict[str, Any]]:
    return {
        layer: {direction: value(cell) for direction, cell in directions.items()}
        for layer, directions in cells.items()
    }


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
