"""Declaration of environment checks: variables, limits, and disk or memory space that a job needs.

A check reports only problems that a document or source code confirms, because a wrong warning costs more
trust than a missing one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mindspeed_dsa.patches.errors import shortened

Level = Literal["error", "warning", "note"]
"""``error`` fails the job or gives wrong results, ``warning`` is slower or risky, ``note`` is informative."""
LEVELS: tuple[Level, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """Problem of a job's environment.

    Attributes:
        level: severity.
        who: variable, flag or limit that causes the problem, with its value.
        what: effect on the job, with the reason.
        do: remedy, as a command if possible.
    """

    level: Level
    who: str
    what: str
    do: str

    def __str__(self) -> str:
        return f"{self.who}: {self.what}; {self.do}"


@dataclass(frozen=True)
class Installation:
    """Copy of Megatron-core on the search path.

    Attributes:
        folder: entry of the search path that contains the package.
        version: version that the package declares, if any.
        has_training: whether it contains Megatron-LM's ``training`` next to ``core``, as a checkout does.
    """

    folder: Path
    version: str | None
    has_training: bool = False

    def __str__(self) -> str:
        return f"{self.version or 'one of unknown release'} in {self.folder}"


@dataclass(frozen=True)
class Machine:
    """Node that a job runs on, and the job's processes there. Unknown values are ``None`` or 0.

    Attributes:
        processors: number of CPUs that this process may run on.
        local_ranks: number of the job's processes on this node.
        world: number of the job's processes.
        architecture: major compute capability of the GPU: 9 is Hopper, 10 Blackwell.
        product: family of the NPU.
        open_files: soft limit of open files; ``None`` means no limit.
        locked_memory: soft limit of locked memory in bytes; ``None`` means no limit.
        shared_memory: free bytes in ``/dev/shm``.
        memory: available bytes of host memory.
        infiniband: whether the node has devices that NCCL's RDMA transport uses.
        megatrons: copies of Megatron-core on the search path, in its order; the first one is used.
        release: release of the Megatron-core that is used.
        torch, torch_npu: releases of torch and torch_npu.
        cann: release of the CANN toolkit that was activated by ``set_env.sh``.
        lacking: dict from torch_npu operator to the reason why it cannot be called.
        devices: number of accelerators visible to this process.
        absent: packages that Megatron-LM imports and that are not installed.
        free: function from a folder, which may not exist yet, to the free bytes there.
    """

    processors: int = 1
    local_ranks: int = 0
    world: int = 0
    architecture: int | None = None
    product: str = ""
    open_files: int | None = None
    locked_memory: int | None = None
    shared_memory: int | None = None
    memory: int | None = None
    infiniband: bool = False
    megatrons: tuple[Installation, ...] = ()
    release: str | None = None
    torch: str | None = None
    torch_npu: str | None = None
    cann: str | None = None
    lacking: Mapping[str, str] = field(default_factory=dict)
    devices: int | None = None
    absent: tuple[str, ...] = ()
    free: Callable[[Path], int | None] = lambda folder: None

    @property
    def nodes(self) -> int:
        """Number of nodes, 1 if unknown."""
        return max(1, self.world // self.local_ranks) if self.local_ranks else 1


@dataclass(frozen=True)
class Surroundings:
    """Input of the environment checks.

    Attributes:
        platform: platform of the job.
        args: job's arguments under Megatron's names; any may be missing.
        features: names of the features that are on.
        overlaps: communication that is hidden behind computation, in words, with the flag that enables it.
        variables: environment variables.
        machine: this node.
        checkpoint: size of a checkpoint in bytes, if the model's sizes are known.
        iteration: iteration of the newest checkpoint in the folder that the job saves to and loads from.
    """

    platform: str
    args: Any = None
    features: frozenset[str] = frozenset()
    overlaps: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    machine: Machine = field(default_factory=Machine)
    checkpoint: float | None = None
    iteration: int = 0

    def argument(self, name: str) -> Any:
        """Return one of the job's arguments, or ``None`` if unknown."""
        return getattr(self.args, name, None)

    def size(self, name: str) -> int:
        """Return a size of the layout or of a tensor, 1 if unknown."""
        return int(self.argument(name) or 1)

    def variable(self, name: str) -> str:
        """Return the value of a variable, empty if not set."""
        return self.variables.get(name, "")

    def is_set(self, name: str) -> bool:
        """Return whether a variable is set to a true value such as ``1``, ``true`` or ``on``."""
        return self.variable(name).strip().lower() in ("1", "true", "yes", "on", "y")

    @property
    def hidden(self) -> str:
        """Communication that the job hides behind computation, as text for a message."""
        return shortened(self.overlaps, 3)


@dataclass(frozen=True)
class EnvironmentCheck:
    """Check of a job's environment, before training starts.

    Attributes:
        name: kebab-case identity, as reports print it.
        subject: variables, limits or files that the check reads.
        when: reported condition and its consequence, in words.
        source: document or code that states the consequence.
        levels: possible levels of the findings.
        find: function that yields the findings.
        platforms: platforms that the check applies to.
        per_node: whether the check runs on every node, not only on rank 0.
        early: whether the check is about installed software. It then also runs before process groups are
            created, and without a job.
        stops: whether an error that it finds ends the job before process groups are created.
    """

    name: str
    subject: str
    when: str
    source: str
    levels: tuple[Level, ...]
    find: Callable[[Surroundings], Iterable[Finding]]
    platforms: tuple[str, ...] = ("cpu", "cuda", "npu")
    per_node: bool = False
    early: bool = False
    stops: bool = False
