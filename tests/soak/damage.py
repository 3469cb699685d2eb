"""Damage to the files of checkpoints, done while the job is down."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "dsa_manifest.json"


def newest(checkpoints: Path, damaged: dict[Path, int]) -> int | None:
    """Return the iteration from which a job has to resume; ``None`` without a checkpoint.

    Args:
        checkpoints: folder of a run's checkpoints.
        damaged: inodes of damaged folders; a checkpoint that was written again has another inode.
    """
    whole = [
        int(path.name[5:])
        for path in checkpoints.glob("iter_*")
        if (path / MANIFEST).is_file() and damaged.get(path) != path.stat().st_ino
    ]
    named = tracked(checkpoints)
    return max((step for step in whole if named is None or step <= named), default=None)


def tracked(checkpoints: Path) -> int | None:
    """Return the tracker's iteration; ``None`` if it has none."""
    try:
        text = (checkpoints / TRACKER).read_text()
    except OSError:
        return None
    return int(text) if re.fullmatch("[0-9]+", text) else None


def folder_of(checkpoints: Path, step: int) -> Path:
    """Return the folder of a checkpoint."""
    return checkpoints / f"iter_{step:07d}"


def truncate(checkpoint: Path, chance: random.Random) -> str:
    """Truncate a shard; return part of the message that the job has to print."""
    shard = _shard(checkpoint, chance)
    size = shard.stat().st_size
    with open(shard, "r+b") as file:
        file.truncate(chance.randrange(size))
    return f"{shard.name} has "


def flip(checkpoint: Path, chance: random.Random) -> str:
    """Flip one bit of a shard."""
    shard = _shard(checkpoint, chance)
    offset = chance.randrange(shard.stat().st_size)
    with open(shard, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))
    return f"{shard.name} has another content"


def lose(checkpoint: Path, chance: random.Random) -> str:
    """Delete a file that the manifest lists."""
    listed = json.loads((checkpoint / MANIFEST).read_bytes())["files"]
    name = chance.choice(sorted(listed))
    (checkpoint / name).unlink()
    return f"{name} is missing"


def put_foreign_json(checkpoint: Path, chance: random.Random) -> str:
    """Replace the manifest, or Megatron's own list, by another program's JSON."""
    name = chance.choice([MANIFEST, "metadata.json"])
    (checkpoint / name).write_text(json.dumps({"name": "another program", "files": []}))
    return f"{name} "


def empty_tracker(checkpoint: Path, chance: random.Random) -> str:
    """Empty the file that names the newest checkpoint."""
    (checkpoint.parent / TRACKER).write_text("")
    return f"{TRACKER} is empty"


DAMAGE: dict[str, Callable[[Path, random.Random], str]] = {
    "truncated": truncate,
    "flipped": flip,
    "missing": lose,
    "foreign": put_foreign_json,
    "tracker": empty_tracker,
}
"""Kinds of damage; each function returns part of the job's message when it skips the checkpoint."""


def _shard(checkpoint: Path, chance: random.Random) -> Path:
    return chance.choice(sorted(checkpoint.glob("*.distcp")))
