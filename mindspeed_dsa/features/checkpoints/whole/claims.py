"""A folder of checkpoints belongs to one job: a file in it says to which, ``.dsa_job.json``."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import uuid
from pathlib import Path
from typing import Any

from mindspeed_dsa.runs.files import RunError, is_running, started, write_atomically

FILE = ".dsa_job.json"


class Claims:
    """Folders that one job has claimed, on its first rank.

    Attributes:
        job: its identity, in manifests as well.
    """

    def __init__(self) -> None:
        self.job = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._claimed: set[Path] = set()

    def claim(self, folder: Path) -> None:
        """Claim a folder, or make sure that the job still has it.

        A claim of a process of this machine that runs is respected. One of another machine is not known to
        be alive: the later job has the folder, and the earlier one is told when it saves again.

        Raises:
            RunError: the folder belongs to another job.
            OSError: nothing can be written there.
        """
        folder = folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        other = _read(folder / FILE)
        if other.get("job") == self.job:
            return
        if folder in self._claimed and other:
            raise RunError(
                f"--save {folder}: another job saves there since then (process {other.get('pid')} on "
                f"{other.get('host')}), and nothing more is written; end one of the two, and give each "
                "its own folder"
            )
        if _runs_here(other):
            raise RunError(
                f"--save {folder}: another job saves there, process {other['pid']} of this machine; end it, "
                "or name another folder"
            )
        pid = os.getpid()
        mine = {"job": self.job, "host": socket.gethostname(), "pid": pid, "started": started(pid)}
        write_atomically(folder / FILE, json.dumps(mine) + "\n")
        self._claimed.add(folder)


def _read(path: Path) -> dict[str, Any]:
    """Return a claim; an empty one where there is none, or none that can be understood."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_bytes())
        if isinstance(content, dict):
            return content
    return {}


def _runs_here(claimed: dict[str, Any]) -> bool:
    """Return whether a claim's process is one of this machine that still runs."""
    pid = claimed.get("pid")
    if claimed.get("host") != socket.gethostname() or not isinstance(pid, int) or pid <= 0:
        return False
    return pid != os.getpid() and is_running(pid) and claimed.get("started") == started(pid)
