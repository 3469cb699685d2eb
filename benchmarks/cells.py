"""Cases made of cells, each of which can be run alone: modules with ``run(link, quick) -> Metrics``.

To add a cell, add a row to the case's table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

RATE = "2gbit"


@dataclass(frozen=True)
class CellCase:
    """``run`` of a case: the entries of its cells; link beds connect processes on the host, for any device.

    Attributes:
        name: of the case.
        cells: modules by the names that ``--only`` takes.
        traced: module whose ``write(link, quick, path)`` draws a step, for cases with ``--trace``.
    """

    name: str
    cells: Mapping[str, str]
    traced: str = ""

    def __call__(
        self,
        device: str,
        quick: bool = False,
        link: str = RATE,
        only: str | None = None,
        trace: str | None = None,
    ) -> dict[str, Any]:
        """Return the entries of all cells.

        Args:
            device: not used.
            quick: tiny problems.
            link: rate of the link.
            only: names of cells with commas between.
            trace: file for the trace of a step; an image is written next to it.

        Raises:
            ValueError: an unknown cell.
        """
        found = run_cells(self.name, self.cells, only, link, quick)
        if trace:
            import_module(self.traced).write(link, quick, Path(trace))
        return found


def run_cells(
    case: str, cells: Mapping[str, str], only: str | None, link: str, quick: bool
) -> dict[str, Any]:
    """Return the entries of all cells, or of some, and the link's rate.

    Args:
        case: for the error's text.
        cells: modules by the names that ``--only`` takes.
        only: names with commas between; None: all.
        link: rate of the link.
        quick: tiny problems.

    Raises:
        ValueError: an unknown cell.
    """
    names = list(cells) if only is None else only.split(",")
    if unknown := [name for name in names if name not in cells]:
        raise ValueError(f"{case} has no cell {', '.join(unknown)}; use {', '.join(cells)}")
    found: dict[str, Any] = {"link": link}
    for name in names:
        found.update(import_module(cells[name]).run(link, quick))
    return found
