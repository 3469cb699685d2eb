"""``experts``: show the recorded load of MoE experts, and compute an expert placement from it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mindspeed_dsa.runs import expert_load, expert_placement
from mindspeed_dsa.runs.metrics import Record
from mindspeed_dsa.session import start_report
from mindspeed_dsa.tools.cli import experts_levers

_DESCRIPTION = """\
Shows what --moe-router-load-report wrote: the load of experts and ranks in every MoE layer, of all steps."""


def run(argv: Sequence[str]) -> int:
    """Print the table of loads; draw the picture and write the placement if requested."""
    options = _parse(argv)
    records = expert_load.read(options.report)
    print("\n".join(start_report.aligned(table(records))))
    print("\n" + "\n".join(start_report.aligned(experts_levers.lines(experts_levers.rows_of(records)))))
    if options.picture is not None:
        expert_load.draw(options.picture, records)
        print(f"\n{options.picture} shows them by step")
    if options.placement is not None:
        _place(records, options.placement, options.expert_model_parallel_size)
    return 0


def _place(records: Sequence[Record], file: Path, ranks: int) -> None:
    loads = expert_load.totals(records)
    placement = expert_placement.place(loads, ranks)
    expert_placement.write(file, placement)
    rows = [("layer", "in order", "placed")]
    for layer, order in placement.orders.items():
        before, after = expert_placement.improvement(loads[layer], order, ranks)
        rows.append((str(layer), f"{before:.3f}", f"{after:.3f}"))
    print(f"\n{file} places them on {ranks} ranks; the most loaded rank over the mean would have been:")
    print("\n".join(start_report.aligned(rows)))


def table(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Return one row per layer: imbalances over the steps, and the three most loaded experts."""
    rows: list[tuple[str, ...]] = [("layer", "stage", "rank imbalance", "expert imbalance", "most loaded")]
    stages = {layer["layer"]: layer["stage"] for each in records for layer in each["layers"]}
    figures = {key: expert_load.imbalances(records, key) for key in ("rank_imbalance", "expert_imbalance")}
    for row, (layer, experts) in enumerate(expert_load.totals(records).items()):
        # Negative load first, then the number: descending load, and a stable order among equal loads.
        hottest = sorted(range(len(experts)), key=lambda expert: (-experts[expert], expert))[:3]
        shares = ", ".join(f"{expert} ({experts[expert] / max(sum(experts), 1):.1%})" for expert in hottest)
        columns = [_mean_and_most(values[row]) for values in figures.values()]
        rows.append((str(layer), str(stages[layer]), *columns, shares))
    return rows


def _mean_and_most(values: Sequence[float]) -> str:
    known = [value for value in values if value == value]  # without NaN, for steps that lack the layer
    return f"{sum(known) / len(known):.2f}, at most {max(known):.2f}"


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mindspeed_dsa experts", description=_DESCRIPTION)
    parser.add_argument("report", type=Path, help=f"the folder given to that flag, or {expert_load.FILE}")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw heat maps, e.g. load.png")
    parser.add_argument(
        "--placement",
        type=Path,
        metavar="FILE",
        help="write a placement of the experts on ranks, for the flag --moe-expert-placement",
    )
    parser.add_argument(
        "--expert-model-parallel-size", type=int, metavar="N", help="on how many ranks, with --placement"
    )
    options = parser.parse_args(list(argv))
    if (options.placement is None) != (options.expert_model_parallel_size is None):
        parser.error("--placement and --expert-model-parallel-size go together")
    return options
