"""Declaration of a check of a job's surroundings: variables, limits and room that it will need.

A check says nothing where it does not apply, and nothing that no source states: a wrong warning costs more
trust than a missing one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Level = Literal["error", "warning", "note"]
"""An error fails or gives wrong results, a warning is slower or risky, a note is worth knowing."""
LEVELS: tuple[Level, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One thing to be changed in a job's surroundings.

    Attributes:
        level: how bad it is.
        who: the variable, flag or limit, with its value.
        what: the effect, with the reason.
        do: what to do, as a command where there is one.
    """

    level: Level
    who: str
    what: str
    do: str

    def __str__(self) -> str:
        return f"{self.who}: {self.what}; {self.do}"


@dataclass(frozen=True)
class Installation:
    """A copy of Megatron-core that the search path has.

    Attributes:
        folder: on the path, the one that holds the package.
        version: that it declares, if it does.
        has_training: it has Megatron-LM's ``training`` beside ``core``, as a checkout does.
    """

    folder: Path
    version: str | None
    has_training: bool = False

    def __str__(self) -> str:
        return f"{self.version or 'one of unknown release'} in {self.folder}"


@dataclass(frozen=True)
class Machine:
    """The node that a job runs on, and the job's processes there; ``None`` and 0 where that is not known.

    Attributes:
        processors: that this process may run on.
        local_ranks: processes of the job on this node.
        world: processes of the job.
        architecture: major compute capability of the GPU: 9 is Hopper, 10 Blackwell.
        product: family of the NPU.
        open_files: soft limit; None: there is none. Likewise ``locked_memory``, in bytes.
        shared_memory: bytes free in ``/dev/shm``.
        memory: bytes of host memory that are available.
        infiniband: the node has devices that NCCL's RDMA transport uses.
        megatrons: copies on the search path, the one that is used first.
        release: of Megatron-core, the one that is used.
        torch: its release, and that of torch_npu.
        cann: release of the CANN whose ``set_env.sh`` was sourced.
        lacking: reasons why operators of torch_npu cannot be called, by operator.
        devices: number of accelerators that this process sees.
        absent: packages that Megatron-LM imports and that are not installed.
        free: bytes free where a folder is, or will be.
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
        """Return the number of nodes, 1 where it is not known."""
        return max(1, self.world // self.local_ranks) if self.local_ranks else 1


@dataclass(frozen=True)
class Surroundings:
    """Everything that checks may ask.

    Attributes:
        platform: of the job.
        args: its arguments, under Megatron's names; may lack any.
        features: names of those that are on.
        overlaps: what is sent while something is computed, in words, with the flag that asks for it.
        variables: the environment.
        machine: this node.
        checkpoint: bytes of a checkpoint, where the model's sizes are known.
        iteration: of the newest checkpoint in the folder that the job saves to and loads from.
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
        """Return one of the job's arguments; None where it is not known."""
        return getattr(self.args, name, None)

    def size(self, name: str) -> int:
        """Return a size of the layout or of a tensor; 1 where it is not known."""
        return int(self.argument(name) or 1)

    def variable(self, name: str) -> str:
        """Return the value of a variable; empty where it is not set."""
        return self.variables.get(name, "")

    def is_set(self, name: str) -> bool:
        """Return whether a switch of the environment is on, however that is spelt."""
        return self.variable(name).strip().lower() in ("1", "true", "yes", "on", "y")

    @property
    def hidden(self) -> str:
        """Return what is sent behind computation, as the object of a sentence."""
        shown = ", ".join(self.overlaps[:3])
        more = len(self.overlaps) - 3
        return f"{shown} and {more} more" if more > 0 else shown


@dataclass(frozen=True)
class EnvironmentCheck:
    """Check of a job's surroundings, before it trains.

    Attributes:
        name: kebab-case identity, as reports print it.
        subject: variables, limits or files that it looks at.
        when: it speaks, in words, with what follows.
        source: where that is stated.
        levels: of what it finds.
        find: its findings.
        platforms: it applies to.
        per_node: it is about a node, not about the job, and asked on each.
        early: it is about what is installed, and asked before process groups start, and without a job.
        stops: an error that it finds ends the job before process groups start.
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
