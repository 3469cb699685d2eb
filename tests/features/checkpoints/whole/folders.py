"""Checkpoint folders for tests, laid out as Megatron writes them."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path

from mindspeed_dsa.runs import manifest
from mindspeed_dsa.runs.whole_checkpoints import TRACKER, name_of

SHARD = 5000
"""Size of a shard in bytes."""


def checkpoint(folder: Path, iteration: int | None, job: str = "mine", listed: bool = True) -> Path:
    """Write the files of a ``torch_dist`` checkpoint, and its manifest."""
    path = folder / name_of(iteration)
    path.mkdir(parents=True)
    for rank in range(2):
        (path / f"__{rank}_0.distcp").write_bytes(os.urandom(SHARD))
    (path / "common.pt").write_bytes(f"{job} {iteration}".encode())
    (path / ".metadata").write_bytes(pickle.dumps({"files": ["__0_0.distcp", "__1_0.distcp"]}))
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    if listed:
        manifest.write(path, job, manifest.sums(path, manifest.names(path)))
    return path


def legacy(folder: Path, iteration: int, listed: bool = True) -> Path:
    """Write the files of a checkpoint in the format ``torch``."""
    path = folder / name_of(iteration)
    for rank in range(2):
        (path / f"mp_rank_{rank:02d}").mkdir(parents=True)
        (path / f"mp_rank_{rank:02d}" / "model_optim_rng.pt").write_bytes(os.urandom(SHARD))
    if listed:
        manifest.write(path, "mine", manifest.sums(path, manifest.names(path)))
    return path


def track(folder: Path, content: object) -> None:
    """Write Megatron's tracker file."""
    (folder / TRACKER).write_text(str(content))


def gone(path: Path) -> bool:
    """Wait until a background thread has deleted a folder; return whether it did."""
    until = time.monotonic() + 20
    while path.exists() or list(path.parent.glob(".*.deleted")):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True
