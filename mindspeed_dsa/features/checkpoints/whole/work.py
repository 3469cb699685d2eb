"""State of a job's saves and loads that the feature's implementations share."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.checkpoints.whole.claims import Claims
from mindspeed_dsa.features.checkpoints.whole.feature import Options
from mindspeed_dsa.runs.manifest import Summing
from mindspeed_dsa.runs.whole_checkpoints import TRACKER, Choice


@dataclass(frozen=True)
class Save:
    """A checkpoint that is being written.

    Attributes:
        folder: of all checkpoints.
        name: of this one.
        token: other than that of any other save; the same on all ranks.
        retain: interval of steps whose checkpoints stay when the next one is whole; ``None``: all do.
        process: of this rank, which may have others write.
    """

    folder: Path
    name: str
    token: str
    retain: int | None = None
    process: int = field(default_factory=os.getpid)

    @property
    def path(self) -> Path:
        """Where its files are."""
        return self.folder / self.name

    @property
    def tracker(self) -> Path:
        """The file that Megatron writes in place of the tracker."""
        return self.folder / f".{TRACKER}.{self.name}"


class Open(threading.local):
    """The file that a thread writes.

    Attributes:
        stream: ``None`` where it has written nothing yet.
    """

    stream: Summing | None = None

    def close(self) -> Summing | None:
        """Return the stream; what is written next is another file's."""
        stream, self.stream = self.stream, None
        return stream


@dataclass
class Work:
    """State that the feature's implementations share.

    Attributes:
        context: of the feature.
        saving: the save whose call of Megatron is running.
        choices: what is loaded, by folder and by what ``--ckpt-step`` says.
        claims: folders that this job saves into.
        open: the file that is written.
    """

    context: Context[Options]
    saving: Save | None = None
    choices: dict[tuple[Path, int | None], Choice] = field(default_factory=dict)
    claims: Claims = field(default_factory=Claims)
    open: Open = field(default_factory=Open)
