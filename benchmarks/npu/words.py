"""Report of the case ``npu`` in Markdown, problems first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu import words as of_gpu
from benchmarks.parts import rows_of, table

_FIGURES = ("lm_loss", "indexer_loss", "grad_norm")
_VERDICTS = {
    "failed": "Wrong: failed, or further from the reference than the bound",
    "slower": "Slower than the reference",
    "refused": "Refused: what runs instead is the reference",
    "not_compared": "Not compared",
}


def report(found: Mapping[str, Any], device: str, operator_parts: Sequence[str]) -> str:
    """Return the report.

    Args:
        found: metrics of the case ``npu``.
        device: NPU's name.
        operator_parts: parts with a row for each operator.
    """
    lines = [f"# {device}", ""]
    for name, title in _VERDICTS.items():
        entries = found[name]
        lines += [f"## {title}", ""]
        lines += [f"* **{what}**: {why}" for what, why in entries.items()] if entries else ["Nothing."]
        lines.append("")
    operators = {what: row for part in operator_parts for what, row in rows_of(found, part).items()}
    sections = (
        _machine(found),
        _operators(operators),
        of_gpu.layers(found),
        _backends(found),
        _ranks(found),
        of_gpu.features({"features": found.get("memory", {})}),
        _profile(found),
    )
    for section in sections:
        if text := list(section):
            lines += [*text, ""]
    return "\n".join(lines).rstrip() + "\n"


def _machine(found: Mapping[str, Any]) -> Iterator[str]:
    machine = found.get("machine", {})
    if "versions" not in machine:
        return
    yield "## Machine"
    yield ""
    yield ", ".join(f"{name} {value or 'not installed'}" for name, value in machine["versions"].items())
    yield ""
    yield f"{machine['product']['name']}: " + "; ".join(
        f"{limit} {value}" for limit, value in machine["limits"].items()
    )
    yield ""
    yield from table(("variable", "value"), iter(machine["environment"].items()))


def _operators(operators: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    for what, row in operators.items():
        worst = max(row["apart"].values()) if row.get("apart") else None
        for direction in ("forward", "backward"):
            figures = row.get(direction)
            if not figures:
                continue
            cells = [
                figures.get(name, "-")
                for name in ("ms", "reference_ms", "speedup", "extra_peak_mib", "reference_extra_peak_mib")
            ]
            deviation = "-" if worst is None else f"{worst:.1e}"
            rows.append((f"{what}, {direction}", row["reference"], *cells, deviation))
    if not rows:
        return
    yield "## Operators"
    yield ""
    yield "Milliseconds and extra MiB at the peak; the deviation is the largest of all results and gradients."
    yield ""
    head = ("", "reference", "ms", "reference's", "speedup", "MiB", "reference's", "apart")
    yield from table(head, iter(rows))


def _backends(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the backends that the fused steps' operators ran on."""
    for name, sides in rows_of(found, "layer").items():
        fused = sides["fused"]
        if not isinstance(fused, str):
            yield f"* {name}, fused: {', '.join(fused['calls'])}"


def _ranks(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the section of the part ``ranks``: collectives and layouts."""
    rows = rows_of(found, "ranks")
    links = [
        (f"{case.partition(',')[0]}, {name}", figures["ms"], figures["gb_s"])
        for case, row in rows.items()
        for name, figures in row.get("rows", {}).items()
        if "gb_s" in figures
    ]
    layouts = [(case, *_beside(row)) for case, row in rows.items() if "apart" in row]
    if not links and not layouts:
        return
    yield "## Ranks"
    yield ""
    if links:
        yield "Bandwidth counts the bytes that a rank has to send at least."
        yield ""
        yield from table(("", "ms", "GB/s"), iter(links))
        yield ""
    if layouts:
        yield "Steps beside those of one rank with the same weights; MC2 and CoC beside the layout without."
        yield ""
        head = ("", "ms", "time / the other's", *(f"{name} apart" for name in _FIGURES))
        yield from table(head, iter(layouts))
        yield ""


def _beside(row: Mapping[str, Any]) -> tuple[Any, ...]:
    apart = (row["apart"].get(name) for name in _FIGURES)
    cells = ("-" if each is None else f"{each:.1e}" for each in apart)
    return (row["step_ms"], f"{row['step_ratio']:.2f}", *cells)


def _profile(found: Mapping[str, Any]) -> Iterator[str]:
    kernels = found.get("profile", {}).get("kernels")
    if not kernels:
        return
    yield "## Operators of fused steps on the device"
    yield ""
    yield "What runs on `AI_CPU` is slow: a few cores compute it. `profile/` opens in MindStudio Insight."
    yield ""
    rows = ((f"`{name}`", row["ms"], row["launches"]) for name, row in kernels.items())
    yield from table(("", "ms", "calls"), rows)
