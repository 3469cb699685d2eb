"""State of a job's saves and loads, shared by the feature's implementations."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.checkpoints.whole.feature import Options
from mindspeed_dsa.runs.files import Sole
from mindspeed_dsa.runs.whole_checkpoints import TRACKER, Choice, put_back


@dataclass(frozen=True)
class Save:
    """Checkpoint that is being written.

    Attributes:
        folder: parent folder of all checkpoints.
        name: name of this checkpoint's folder.
        retain: ``--save-retain-interval``, whose multiples are the iterations to keep; ``None`` keeps all.
        process: process id of this rank, which may start writer processes.
    """

    folder: Path
    name: str
    retain: int | None = None
    process: int = field(default_factory=os.getpid)

    @property
    def path(self) -> Path:
        """Folder of the checkpoint's files."""
        return self.folder / self.name

    @property
    def tracker(self) -> Path:
        """Temporary file that Megatron writes instead of the tracker."""
        return self.folder / f".{TRACKER}.{self.name}"


LOCK = ".dsa_job.lock"
"""Name of the lock file in the folder of a job's checkpoints."""


@dataclass
class Work:
    """State of the whole-checkpoints feature in one job.

    Attributes:
        context: context of the feature.
        saving: checkpoint being saved, while Megatron's ``save_checkpoint`` runs; ``None`` otherwise.
        choices: dict from (folder, ``--ckpt-step``) to the checkpoint to load.
        job: name of the job in manifests.
        unfinished: folders that asynchronous saves still write.
    """

    context: Context[Options]
    saving: Save | None = None
    choices: dict[tuple[Path, int | None], Choice] = field(default_factory=dict)
    job: str = field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}")
    unfinished: set[Path] = field(default_factory=set)
    _locks: dict[Path, Sole] = field(default_factory=dict)

    def lock(self, folder: Path) -> None:
        """Lock a folder against other jobs until this process ends, and undo what an ended job has begun.

        Raises:
            RunError: another job saves there.
            OSError: the folder is not writable.
        """
        folder = folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if folder not in self._locks:
            self._locks[folder] = Sole(folder / LOCK, f"{self.context.feature}: --save {folder}")
            put_back(folder)
