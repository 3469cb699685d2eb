"""The report in words: Markdown, what is slow first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_SLOWEST = 12


def report(found: Mapping[str, Any], device: str) -> str:
    """One page.

    Args:
        found: metrics of the case ``gpu``.
        device: the GPU's name.
    """
    parts = (_summary, _model, _operators, _layer, _trace)
    lines = [f"# {device}", ""]
    for part in parts:
        lines += [*part(found), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(head: tuple[str, ...], rows: Iterator[tuple[Any, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"| {' | '.join(['---'] + ['---:'] * (len(head) - 1))} |"
    for row in rows:
        yield f"| {' | '.join(f'{cell:,.3g}' if isinstance(cell, float) else str(cell) for cell in row)} |"


def _summary(found: Mapping[str, Any]) -> Iterator[str]:
    tests = found.get("parity", {})
    if "passed" in tests:
        failures = len(tests["failures"])
        yield f"Tests of the kernels on the device: {tests['passed']} passed, {failures} failed."
    for what, why in found["failed"].items():
        yield f"* **{what}**: {why}"


def _model(found: Mapping[str, Any]) -> Iterator[str]:
    yield "## Slower than the model"
    yield ""
    slower = found["slower_than_model"]
    if isinstance(slower, str):
        yield slower
        return
    yield "Milliseconds, and the bound of `benchmarks/results/kernels-static.json` for the kernels' products."
    yield ""
    rows = list(slower.items())[:_SLOWEST]
    yield from _table(
        ("", "ms", "model", "times"),
        ((name, row["ms"], row["model_ms"], f"{row['times']:.2f}") for name, row in rows),
    )


def _operators(found: Mapping[str, Any]) -> Iterator[str]:
    operators = found.get("operators", {})
    if "matmul_tflops" not in operators:
        return
    yield "## Operators"
    yield ""
    yield f"A bf16 matmul of 8192 reaches {operators['matmul_tflops']:.0f} TFLOP/s."
    yield ""
    notes = {}
    rows = []
    for problem, table in operators.items():
        if isinstance(table, str):
            notes[table] = problem
        if not isinstance(table, dict):
            continue
        for operator, directions in table.items():
            if isinstance(directions, str):
                notes[f"{operator}: {directions}"] = problem
                continue
            rows += [(f"{problem} {operator} {each}", *_figures(row)) for each, row in directions.items()]
    yield from _table(("", "ms", "TFLOP/s", "of the matmul", "extra peak MiB"), iter(rows))
    yield ""
    yield from (f"* {note} ({problem})" for note, problem in notes.items())


def _figures(row: Mapping[str, float]) -> tuple[Any, ...]:
    return (
        row["ms"],
        f"{row['tflops']:.0f}",
        f"{row['fraction_of_matmul']:.0%}",
        f"{row['extra_peak_mib']:,.0f}",
    )


def _layer(found: Mapping[str, Any]) -> Iterator[str]:
    layer = {name: row for name, row in found.get("layer", {}).items() if isinstance(row, dict)}
    if not layer:
        return
    yield "## Training steps"
    yield ""

    def row(name: str, sides: Mapping[str, Any]) -> tuple[Any, ...]:
        cells: list[Any] = [name]
        for figure in ("tokens_per_s", "peak_mib"):
            for side in ("stock", "fused"):
                value = sides[side]
                cells.append("-" if isinstance(value, str) else f"{value[figure]:,.0f}")
        apart = sides.get("apart", {})
        return (*cells, *(f"{apart[name]:.1e}" if apart else "-" for name in ("lm_loss", "indexer_loss")))

    head = ("", "tokens/s stock", "fused", "peak MiB stock", "fused", "loss apart", "indexer loss apart")
    yield from _table(head, (row(name, sides) for name, sides in layer.items()))
    yield ""
    for name, sides in layer.items():
        for side in ("stock", "fused"):
            if isinstance(sides[side], str):
                yield f"* {name}, {side}: {sides[side]}"


def _trace(found: Mapping[str, Any]) -> Iterator[str]:
    trace = found.get("trace", {})
    if "kernels" not in trace:
        return
    yield "## Kernels of a fused step"
    yield ""
    yield f"`{trace['file']}` is for [Perfetto](https://ui.perfetto.dev)."
    yield ""
    kernels = trace["kernels"].items()
    yield from _table(
        ("", "ms", "launches"), ((f"`{name}`", row["ms"], row["launches"]) for name, row in kernels)
    )
