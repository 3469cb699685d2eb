"""What is on its way: results that collectives are still writing to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass
class Pending:
    """A result that collectives are still writing to.

    ``inputs`` are what they read.
    """

    result: Tensor
    works: list[Any]
    inputs: list[Tensor]

    def wait(self) -> Tensor:
        """The finished result."""
        for work in self.works:
            work.wait()
        self.works, self.inputs = [], []
        return self.result
