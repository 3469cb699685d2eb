"""Figures of the part ``rivals``: a table, and a picture of rates over lengths."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.projects import OURS
from benchmarks.gpu.rivals import Cell
from benchmarks.parts import table

PICTURE = "rivals.png"
_DRAWN = Cell(0, 0).selection
"""Selection that the picture shows."""
_HEAD = ("", "ms", "TFLOP/s", "of the matmul", "cold ms", "cold TFLOP/s", "from ours", "its time over ours")
_PRESENT = "No other project's kernels were there: the figures are ours alone."

Row = tuple[str, str, str, Mapping[str, float]]
"""Cell, direction, project and figures."""


def words(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the report's section; nothing if the part did not run.

    Args:
        found: metrics of the case ``gpu``.
    """
    part = found.get("rivals", {})
    if "cells" not in part:
        return
    rows, notes = _split(part)
    yield "## Beside other projects"
    yield ""
    yield f"A bf16 matmul of 8192 in the same process reaches {part['matmul_tflops']:.0f} TFLOP/s."
    if not _others(rows):
        yield _PRESENT
    yield ""
    ours = {(cell, direction): row["ms"] for cell, direction, project, row in rows if project == OURS}

    def cells(cell: str, direction: str, project: str, row: Mapping[str, float]) -> tuple[Any, ...]:
        our_ms = ours.get((cell, direction))
        return (
            f"{cell}: {direction}, {project}",
            row["ms"],
            f"{row['tflops']:.0f}",
            f"{row['fraction_of_matmul']:.0%}",
            row["cold_ms"],
            f"{row['cold_tflops']:.0f}",
            "-" if project == OURS else f"{row['apart']:.1e}",
            "-" if project == OURS or our_ms is None else f"{row['ms'] / our_ms:.2f}",
        )

    yield from table(_HEAD, (cells(*row) for row in rows))
    yield ""
    yield from (f"* {project}: {why}" for project, why in part["absent"].items())
    yield from (f"* {note} ({', '.join(where)})" for note, where in notes.items())
    if rows:
        yield ""
        yield f"![TFLOP/s over S]({PICTURE})"


def draw(found: Mapping[str, Any], path: Path) -> bool:
    """Draw TFLOP/s with warm caches over the number of rows, a panel for each direction and number of heads.

    Args:
        found: figures of the part ``rivals``.
        path: picture's file.

    Returns:
        Whether there was something to draw.
    """
    rows = [row for row in _split(found)[0] if row[0].endswith(_DRAWN)] if "cells" in found else []
    if not rows:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines: dict[tuple[str, int], dict[str, list[tuple[int, float]]]] = {}
    for cell, direction, project, row in rows:
        sizes = re.match(r"S(\d+)_H(\d+)", cell)
        assert sizes is not None
        length, heads = map(int, sizes.groups())
        panel = lines.setdefault((direction, heads), {})
        panel.setdefault(project, []).append((length, row["tflops"]))
    directions, columns = (sorted({key[at] for key in lines}, reverse=at == 0) for at in (0, 1))
    projects = [OURS, *_others(rows)]
    size = (4 * len(columns) + 0.5, 3 * len(directions) + 0.5)
    shape = len(directions), len(columns)
    figure, axes = pyplot.subplots(*shape, figsize=size, squeeze=False, sharex=True, sharey=True)
    handles: dict[str, Any] = {}
    for panels, direction in zip(axes, directions, strict=True):
        for axis, heads in zip(panels, columns, strict=True):
            for number, project in enumerate(projects):
                if points := sorted(lines.get((direction, heads), {}).get(project, [])):
                    axis.plot(*zip(*points, strict=True), marker="o", color=f"C{number}", label=project)
            handles |= {line.get_label(): line for line in axis.lines}
            axis.axhline(found["matmul_tflops"], color="#888888", linestyle=":")
            axis.set_title(f"{direction}, {heads} heads", loc="left")
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("TFLOP/s; dotted: matmul of 8192")
    figure.supxlabel(f"rows; {_DRAWN}, warm caches")
    title = None if len(projects) > 1 else _PRESENT
    figure.legend(handles.values(), handles, title=title, ncols=5, loc="upper right", frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.92))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def _split(part: Mapping[str, Any]) -> tuple[list[Row], dict[str, list[str]]]:
    """Return the rows with figures, and the cells of each note that replaces figures."""
    rows: list[Row] = []
    notes: dict[str, list[str]] = {}
    for cell, directions in part["cells"].items():
        if isinstance(directions, str):
            notes.setdefault(directions, []).append(cell)
            continue
        for direction, projects in directions.items():
            for project, figures in projects.items():
                if isinstance(figures, str):
                    notes.setdefault(f"{project}, {direction}: {figures}", []).append(cell)
                else:
                    rows.append((cell, direction, project, figures))
    return rows, notes


def _others(rows: list[Row]) -> list[str]:
    """Return the projects that have figures, without ours."""
    return list(dict.fromkeys(project for _, _, project, _ in rows if project != OURS))
