"""Order of accesses to shared memory between the partitions of a kernel, for ``gluon_on_cpu``.

A partition counts three kinds of actions: its own loads and stores, its copies, and its products. The last
two run beside it: a copy ends for whoever waits for its barrier, and a product for the partition that waits
for it. A barrier passes on how much each arriving partition knows to have ended (vector clocks). An access
fails if a conflicting one is not known to have ended, in whatever order the interpreter ran them.

Products read shared memory through another path of the GPU (the async proxy). They see a store or a copy only
after a fence of a partition that knew it to have ended.
"""

from __future__ import annotations

import torch

PARTITIONS = 3
"""Largest number of partitions of a kernel."""
ITSELF, COPIES, PRODUCTS = range(3)
_NAMES = ("store", "copy", "product")
_AGENTS = 3 * PARTITIONS


class Race(AssertionError):
    """Two accesses to the same shared memory whose order nothing determines."""


class Knowledge:
    """Number of each agent's actions that are known to have ended, and to have been fenced.

    An agent is one kind of action of one partition.
    """

    def __init__(self) -> None:
        self.ended, self.fenced = torch.zeros(2, _AGENTS, dtype=torch.int32)

    def add(self, other: Knowledge) -> None:
        torch.maximum(self.ended, other.ended, out=self.ended)
        torch.maximum(self.fenced, other.fenced, out=self.fenced)


class Partition(Knowledge):
    """Knowledge of partition ``number``, and the numbers of its current actions."""

    def __init__(self, number: int) -> None:
        super().__init__()
        assert number < PARTITIONS
        self.number, self.current = number, [1, 1, 1]
        self.ended[self.agent(ITSELF)] = 1

    def agent(self, kind: int) -> int:
        return 3 * self.number + kind

    def tell(self, barrier: Knowledge) -> None:
        """Arrive at a barrier."""
        barrier.add(self)
        self._advance()

    def tell_of_copies(self, barrier: Knowledge) -> None:
        """Let the copies so far arrive at a barrier when they have ended."""
        told = Knowledge()
        # They began after all that the partition knew, except its own stores, which they do not wait for.
        told.add(self)
        told.ended[self.agent(ITSELF)] = 0
        told.ended[self.agent(COPIES)] = self.current[COPIES]
        barrier.add(told)
        self.current[COPIES] += 1

    def fence(self) -> None:
        """Show all that is known to have ended to products."""
        self.fenced = self.ended.clone()
        self._advance()

    def start_product(self) -> int:
        """Return the number of a product that starts."""
        self.current[PRODUCTS] += 1
        return self.current[PRODUCTS]

    def end_product(self, number: int) -> None:
        self.ended[self.agent(PRODUCTS)] = number

    def _advance(self) -> None:
        self.current[ITSELF] += 1
        self.ended[self.agent(ITSELF)] = self.current[ITSELF]


class Record:
    """Last accesses to ``units`` of two bytes of shared memory: who wrote each, and who has read it."""

    def __init__(self, units: int) -> None:
        self.writer = torch.zeros(units, dtype=torch.int32)
        self.written = torch.zeros(units, dtype=torch.int32)
        self.read_by: dict[int, torch.Tensor] = {}

    def read(self, by: Partition, kind: int, units: torch.Tensor) -> None:
        """Record that an agent reads units, or raise :class:`Race`."""
        self._follow_writes(by, kind, units)
        read = self.read_by.setdefault(by.agent(kind), torch.zeros_like(self.written))
        read[units] = by.current[kind]

    def write(self, by: Partition, kind: int, units: torch.Tensor) -> None:
        """Record that an agent writes units, or raise :class:`Race`."""
        self._follow_writes(by, kind, units)
        for agent, read in self.read_by.items():
            if (read[units] > by.ended[agent]).any():
                raise Race(f"partition {by.number} overwrites what {_named(agent)} may still read")
        self.writer[units] = by.agent(kind)
        self.written[units] = by.current[kind]

    def _follow_writes(self, by: Partition, kind: int, units: torch.Tensor) -> None:
        known = torch.minimum(by.ended, by.fenced) if kind == PRODUCTS else by.ended
        writer = self.writer[units]
        late = self.written[units] > known[writer]
        if late.any():
            raise Race(f"partition {by.number} has not waited for or fenced {_named(int(writer[late][0]))}")


def _named(agent: int) -> str:
    return f"a {_NAMES[agent % 3]} of partition {agent // 3}"
