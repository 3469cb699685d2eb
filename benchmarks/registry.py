"""The one list of benchmark cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Union

Metrics = Mapping[str, Union[float, int, "Metrics"]]
"""Plain numbers, or nested tables of plain numbers."""


@dataclass(frozen=True)
class Case:
    """One benchmark.

    Attributes:
        name: as on the command line.
        summary: one line.
        module: where its ``run(device) -> Metrics`` is; imported when the case is run.
        on_device: whether it computes on a device, so that ``--device auto`` looks for one.
    """

    name: str
    summary: str
    module: str
    on_device: bool = True

    def run(self, device: str) -> Metrics:
        """Measure."""
        function: Callable[[str], Metrics] = import_module(self.module).run
        return function(device)


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(
            "patch-engine",
            "what patches cost: per call, when armed, checked and verified, and when nothing is on",
            "benchmarks.patch_engine",
            on_device=False,
        ),
    )
}
