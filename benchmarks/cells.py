"""Cases made of cells, each of which can be run alone: modules with ``run(link, quick) -> Metrics``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def run_cells(
    case: str, cells: Mapping[str, str], only: str | None, link: str, quick: bool
) -> dict[str, Any]:
    """The entries of all cells, or of some, and the link's rate.

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
