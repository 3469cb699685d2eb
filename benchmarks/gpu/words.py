"""Report of the case ``gpu`` in Markdown, slow operators first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.gpu import backward, beside, selection
from benchmarks.gpu.layer import pays_from
from benchmarks.gpu.streams import least_tokens
from benchmarks.parts import rows_of, table


def report(found: Mapping[str, Any], device: str) -> str:
    """Return the report.

    Args:
        found: metrics of the case ``gpu``.
        device: GPU's name.
    """
    parts = (
        *(_summary, _model, selection.words, backward.words, _operators, beside.words),
        *(layers, features, streams, _trace),
    )
    lines = [f"# {device}", ""]
    for part in parts:
        lines += [*part(found), ""]
    return "\n".join(lines).rstrip() + "\n"


def _summary(found: Mapping[str, Any]) -> Iterator[str]:
    tests = found.get("parity", {})
    if "passed" in tests:
        failures = len(tests["failures"])
        yield f"Tests of the kernels on the device: {tests['passed']} passed, {failures} failed."
    checked = found.get("sanitizer", {})
    if "absent" in checked:
        yield f"Accesses: {checked['absent']}."
    elif checked.get("errors") == 0:
        yield f"Accesses, by compute-sanitizer: none wrong in {len(checked['calls'])} calls."
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
    yield from table(
        ("", "ms", "model", "times"),
        ((name, row["ms"], row["model_ms"], f"{row['times']:.2f}") for name, row in slower.items()),
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
    for problem, figures in operators.items():
        if isinstance(figures, str):
            notes[figures] = problem
        if not isinstance(figures, dict):
            continue
        for operator, directions in figures.items():
            rows += [(f"{problem} {operator} {each}", *_figures(row)) for each, row in directions.items()]
    yield from table(("", "ms", "TFLOP/s", "of the matmul", "extra peak MiB"), iter(rows))
    yield ""
    yield from (f"* {note} ({problem})" for note, problem in notes.items())


def _figures(row: Mapping[str, float]) -> tuple[Any, ...]:
    return (
        row["ms"],
        f"{row['tflops']:.0f}",
        f"{row['fraction_of_matmul']:.0%}",
        f"{row['extra_peak_mib']:,.0f}",
    )


def layers(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the section of the part ``layer``: steps of whole layers."""
    layer = rows_of(found, "layer")
    if not layer:
        return
    yield "## Training steps"
    yield ""

    def row(name: str, sides: Mapping[str, Any]) -> tuple[Any, ...]:
        cells: list[Any] = [name]
        for figure in ("tokens_per_s", "peak_mib"):
            for side in ("stock", "fused"):
                value = sides[side]
                absent = isinstance(value, str) or figure not in value
                cells.append("-" if absent else f"{value[figure]:,.0f}")
        apart = sides.get("apart", {})
        return (*cells, *(f"{apart[name]:.1e}" if apart else "-" for name in ("lm_loss", "indexer_loss")))

    head = ("", "tokens/s stock", "fused", "peak MiB stock", "fused", "loss apart", "indexer loss apart")
    yield from table(head, (row(name, sides) for name, sides in layer.items()))
    yield ""
    for name, sides in layer.items():
        for side in ("stock", "fused"):
            if isinstance(sides[side], str):
                yield f"* {name}, {side}: {sides[side]}"
    for model, tokens in pays_from(layer).items():
        less = "is slower than stock" if tokens is None else f"pays from {tokens} tokens on"
        yield f"* {model}: fused DSA {less}"


def features(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the section of the part ``features``: features off and on."""
    cases = {name: row for name, row in rows_of(found, "features").items() if "apart" in row}
    if not cases:
        return
    yield "## Features"
    yield ""
    yield "A few steps of a small model with each, beside the same without: 0 are the same bits."
    yield ""

    def row(name: str, figures: Mapping[str, Any]) -> tuple[Any, ...]:
        memory = (figures.get(each, {"off": 0.0, "on": 0.0}) for each in ("peak_mib", "rest_mib"))
        cells = [f"{each[side]:,.0f}" for each in memory for side in ("off", "on")]
        return (name, *cells, f"{figures['step_ratio']:.2f}", f"{figures['apart']['lm_loss']:.1e}")

    head = ("", "peak MiB off", "on", "at rest MiB off", "on", "time on / off", "loss apart")
    yield from table(head, (row(name, figures) for name, figures in cases.items()))


def streams(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the section of the part ``streams``: work on one stream and on two."""
    rows = {name: row for name, row in rows_of(found, "streams").items() if "ratio" in row}
    if not rows:
        return
    yield "## Two streams"
    yield ""
    yield "Milliseconds of a part of a DeepSeek-V3.2 layer's forward beside other work, and in turns with it."
    yield ""
    yield from table(
        ("", "in turns", "beside", "beside / in turns"),
        ((name, row["in turns"], row["beside"], f"{row['ratio']:.2f}") for name, row in rows.items()),
    )
    if (least := least_tokens(rows)) is not None:
        yield ""
        yield f"The indexer's projections are never slower beside from {least} tokens on (LEAST_TOKENS)."


def _trace(found: Mapping[str, Any]) -> Iterator[str]:
    for name, sides in rows_of(found, "layer").items():
        fused = sides["fused"]
        if isinstance(fused, str) or "kernels" not in fused:
            continue
        yield f"## Kernels of a fused step: {name}"
        yield ""
        yield "`trace.json` is for [Perfetto](https://ui.perfetto.dev)."
        yield ""
        kernels = fused["kernels"].items()
        yield from table(
            ("", "ms", "launches"), ((f"`{each}`", row["ms"], row["launches"]) for each, row in kernels)
        )
