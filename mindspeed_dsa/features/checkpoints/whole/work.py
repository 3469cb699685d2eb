"""State of a job's saves and loads that the feature's implementations share."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.checkpoints.whole.feature import Options
from mindspeed_dsa.runs.files import Sole
from mindspeed_dsa.runs.whole_checkpoints import TRACKER, Choice


@dataclass(frozen=True)
class Save:
    """A checkpoint that is being written.

    Attributes:
        folder: folder of all checkpoints.
        name: name of this one's.
        retain: interval of steps whose checkpoints stay when the next one is whole; ``None``: all do.
        process: process of this rank, which may have others write.
    """

    folder: Path
    name: str
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


LOCK = ".dsa_job.lock"
"""Name of the file in a folder of checkpoints that the job which saves there has locked."""


@dataclass
class Work:
    """State that the feature's implementations share.

    Attributes:
        context: context of the feature.
        saving: the save whose call of Megatron is running.
        choices: checkpoints to load, by folder and by ``--ckpt-step``.
        job: name of the job in manifests.
    """

    context: Context[Options]
    saving: Save | None = None
    choices: dict[tuple[Path, int | None], Choice] = field(default_factory=dict)
    job: str = field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}")
    _locks: dict[Path, Sole] = field(default_factory=dict)

    def lock(self, folder: Path) -> None:
        """Keep other jobs out of a folder until this process ends.

        Raises:
            RunError: another job saves there.
            OSError: nothing can be written there.
        """
        folder = folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if folder not in self._locks:
            self._locks[folder] = Sole(folder / LOCK, f"{self.context.feature}: --save {folder}")
