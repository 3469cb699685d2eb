"""Cases made of cells that can run separately: modules with ``run(link, quick) -> Metrics``.

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
    """``run`` of a case made of cells. Link beds connect processes on the host, for any device.

    Attributes:
        name: case's name.
        cells: dict from a cell's name for ``--only`` to its module.
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
            only: comma-separated names of cells; default: all.
            trace: file for the trace of a step; an image is written next to it.

        Raises:
            ValueError: unknown cell.
        """
        entries = run_cells(self.name, self.cells, only, link, quick)
        if trace:
            import_module(self.traced).write(link, quick, Path(trace))
        return entries


def run_cells(
    case: str, cells: Mapping[str, str], only: str | None, link: str, quick: bool
) -> dict[str, Any]:
    """Return the entries of the selected cells, and the link's rate.

    Args:
        case: case's name, for the error message.
        cells: dict from a cell's name for ``--only`` to its module.
        only: comma-separated names of cells; None: all.
        link: rate of the link.
        quick: tiny problems.

    Raises:
        ValueError: unknown cell.
    """
    names = list(cells) if only is None else only.split(",")
    if unknown := [name for name in names if name not in cells]:
        raise ValueError(f"{case} has no cell {', '.join(unknown)}; use {', '.join(cells)}")
    entries: dict[str, Any] = {"link": link}
    for name in names:
        entries.update(import_module(cells[name]).run(link, quick))
    return entries
