"""``python -m benchmarks.kernels.page``: writes tables of docs/design/gpu-kernels.md from the results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.kernels import backward

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks/results/kernels-static.json"
PAGE = ROOT / "docs/design/gpu-kernels.md"
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"
_GPUS = {"sm_80": ("A100",), "sm_90": ("H100", "H200"), "sm_100": ("B200",), "sm_120": ()}


def tables(metrics: Mapping[str, Any]) -> str:
    """Return a table for each target, in bf16.

    Args:
        metrics: metrics of the case ``kernels-static``.
    """
    targets = ["\n".join(_table(target, metrics)) + "\n" for target in metrics["kernels"]]
    bounds = ("\n".join(rows) + "\n" for rows in (_selection(metrics), backward.table(metrics)))
    return "\n".join([*bounds, *targets])


def page(text: str, metrics: Mapping[str, Any]) -> str:
    """Return the page with its tables replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables(metrics)}\n{END}{after}"


def _selection(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of scores and selection, on the first of Hopper's GPUs."""
    gpu, problems = next(iter(metrics["selection_ms"].items()))
    yield "### Scores and selection"
    yield ""
    yield f"Bounds in ms, {gpu}, causal rows, topk 2048 ([measured](gpu.md#scores-and-selection))."
    yield ""
    names = ("scores", "selection", "both")
    yield f"| problem | {' | '.join(names)} |"
    yield f"| {' | '.join(['---'] + ['---:'] * len(names))} |"
    for problem, ms in problems.items():
        yield f"| {problem} | {' | '.join(f'{ms[name]:.3g}' for name in names)} |"


def _table(target: str, metrics: Mapping[str, Any]) -> Iterator[str]:
    gpus = _GPUS[target]
    yield f"### {target}"
    yield ""
    names = ("kernel", "registers", "spilled B", "shared B", "products", "waits", "FLOP per L2 B", *gpus)
    yield f"| {' | '.join(names)} |"
    yield f"| {' | '.join(['---'] + ['---:'] * (len(names) - 1))} |"
    for name, row in metrics["kernels"][target].items():
        kinds = {"wgmma": "wgmma", "tcgen05": "tcgen05", "mma": "mma.sync"}
        products = ", ".join(f"{row[key]} {kind}" for key, kind in kinds.items() if row[key])
        cells = [name, row["registers"], row["spilled"], f"{row['shared']:,}", products or "-", row["waits"]]
        cells += [row.get("flop_per_l2_byte", "-")]
        cells += [f"{row[gpu]:.0%}" if gpu in row else "-" for gpu in gpus]
        yield f"| {' | '.join(map(str, cells))} |"
    bound_of = metrics["model_fraction_of_peak"]
    for name in dict.fromkeys(name for gpu in gpus for name in bound_of.get(gpu, {})):
        if name.startswith("backward, "):
            bounds = (f"{bound_of[gpu][name]:.0%}" for gpu in gpus)
            yield f"| {' | '.join([name, *['-'] * 6, *bounds])} |"


if __name__ == "__main__":
    found = json.loads(RESULT.read_text())["metrics"]
    PAGE.write_text(page(PAGE.read_text(), found))
