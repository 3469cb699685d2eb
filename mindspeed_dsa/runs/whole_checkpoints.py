"""Detection of complete checkpoints in a folder of Megatron-LM checkpoints, and choice of one to load.

A folder has subfolders ``iter_0000100`` and so on, possibly ``release``, and a tracker file
(``latest_checkpointed_iteration.txt``) that names the latest checkpoint. Imports neither torch nor Megatron.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_dsa.runs import manifest
from mindspeed_dsa.runs.files import RunError, beside, delete, number

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Megatron's name for a checkpoint without a training state: loaded without optimizer, starting at step 0."""
UNCHECKED = f"it has no {manifest.NAME}, as Megatron alone writes it, and is taken unchecked"
_ITERATION = re.compile(r"iter_(\d{7,18})")
_REPLACED = ".replaced"
_ASIDE = re.compile(rf"\.iter_(\d{{7,18}}){re.escape(_REPLACED)}")
_LAST = "metadata.json"
"""Last file that Megatron writes in a distributed checkpoint."""
_INDEX = ".metadata"
_SHARDS = re.compile(rb"__\d+_\d+\.distcp")
"""Names of files in torch's pickled index, which stores each name contiguously."""
_SHOWN = 40  # maximum characters of a damaged file in a message
_MOST = 3  # maximum number of checkpoints in a message
_ABSENT = f"there is no {TRACKER}"


@dataclass(frozen=True)
class State:
    """State of a checkpoint, as far as it is known without loading.

    Attributes:
        path: folder of the checkpoint.
        iteration: checkpoint's iteration; ``None`` for ``release``.
        damage: description of the damage; empty if none is known.
        listed: checkpoint's manifest; ``None`` if there is none, or it is unreadable.
    """

    path: Path
    iteration: int | None
    damage: str
    listed: manifest.Manifest | None


@dataclass(frozen=True)
class Choice:
    """Checkpoint to load.

    Attributes:
        state: state of the checkpoint; ``None`` if the folder has neither checkpoints nor a tracker.
        passed: descriptions of the checkpoints that were skipped, with reasons.
        unverified: whether checksums were requested but are missing.
    """

    state: State | None
    passed: tuple[str, ...] = ()
    unverified: bool = False


def name_of(iteration: int | None) -> str:
    """Return the name of a checkpoint's folder; ``None`` stands for ``release``."""
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def tracked(folder: Path) -> tuple[int | str | None, str]:
    """Read a tracker file.

    Returns:
        Iteration or ``release`` that the file names, or ``None``; and a description of a problem with the
        file, or an empty string.
    """
    try:
        with open(folder / TRACKER, "rb") as file:
            # A damaged tracker may be huge: read only as much as a message shows.
            text = file.read(_SHOWN + 1).decode("ascii", errors="backslashreplace").strip()
    except FileNotFoundError:
        return None, _ABSENT
    except OSError as error:
        return None, f"{TRACKER} cannot be read ({error.strerror or error})"
    if text == RELEASE:
        return RELEASE, ""
    value = number(text)
    if value is None:
        return None, f"{TRACKER} says {text[:_SHOWN]!r}" if text else f"{TRACKER} is empty"
    return value, ""


def is_tracked(folder: Path, name: str) -> bool:
    """Return whether the tracker names the checkpoint."""
    latest, _ = tracked(folder)
    return name == (name_of(latest) if isinstance(latest, int) else latest)


def iterations(folder: Path) -> list[int]:
    """Return the iterations of all checkpoint folders by name, newest first.

    Raises:
        RunError: the folder cannot be read.
    """
    try:
        matches = [_ITERATION.fullmatch(entry.name) for entry in os.scandir(folder)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(
            f"{folder} cannot be read ({error.strerror or error}); name a folder that holds checkpoints"
        ) from error
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def state_of(folder: Path, iteration: int | None, contents: bool = False) -> State:
    """Check a checkpoint's files without loading them, and return its state.

    Args:
        folder: parent folder of the checkpoints.
        iteration: iteration; ``None`` for ``release``.
        contents: whether to compare checksums in addition to sizes.
    """
    path = folder / name_of(iteration)
    try:
        listed = manifest.read(path)
        if listed is not None:
            return State(path, iteration, manifest.damage(path, listed, contents), listed)
        return State(path, iteration, _unfinished(path), None)
    except RunError as error:
        return State(path, iteration, str(error), None)
    except OSError as error:
        return State(path, iteration, f"it cannot be read ({error.strerror or error})", None)


def _unfinished(path: Path) -> str:
    """Describe a part that a checkpoint without manifest lacks; empty if no missing part is known."""
    if not path.is_dir():
        return "it is missing"
    with os.scandir(path) as entries:
        present = {entry.name for entry in entries}
    if present & {_LAST, _INDEX}:
        return _incomplete(path, present)
    # --ckpt-format torch: one folder per tensor and pipeline parallel rank.
    ranks = sorted(name for name in present if name.startswith("mp_rank_"))
    if not ranks:
        return "it was not written to its end"
    for name in ranks:
        if (path / name).is_dir() and not os.listdir(path / name):
            return f"{name} is empty"
    return "" if ranks[0].startswith("mp_rank_00") else "mp_rank_00 is missing"


def _incomplete(path: Path, found: set[str]) -> str:
    """Describe a missing file of a distributed checkpoint, for example after an interrupted deletion."""
    # The index names the files. It is searched as bytes, and not unpickled.
    if _INDEX in found:
        named = {name.decode() for name in _SHARDS.findall((path / _INDEX).read_bytes())}
        lost = sorted(named - found)
        if lost:
            return f"{lost[0]} is missing"
    if _LAST not in found:
        return f"{_LAST} is missing" if "common.pt" in found else ""  # torch_dcp has neither of the two
    try:
        kind = json.loads((path / _LAST).read_bytes())["sharded_backend"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""  # Megatron reports this file itself
    return f"{_INDEX} is missing" if kind == "torch_dist" and _INDEX not in found else ""


def choose(folder: Path, step: int | None = None, contents: bool = False) -> Choice:
    """Choose the checkpoint to load: the newest complete one that is not newer than the tracker's.

    Checkpoints newer than the tracker's are used only if no other one is complete, because a user may have
    set the tracker back on purpose. A checkpoint without a manifest counts as complete only if the tracker
    names it, or if it has the last file that Megatron writes.

    Args:
        folder: parent folder of the checkpoints.
        step: iteration to check and load; ``None`` for the best checkpoint.
        contents: whether to compare checksums of the candidates in addition to sizes.

    Raises:
        RunError: no checkpoint is complete, or the folder cannot be read.
    """
    if step is not None:
        state = state_of(folder, step, contents)
        if state.damage:
            raise RunError(
                f"checkpoint {state.path} is not whole: {state.damage}; choose another with --ckpt-step, or "
                "omit that to load the newest whole one"
            )
        return Choice(state, unverified=contents and not _has_sums(state))
    latest, wrong = tracked(folder)
    passed = [wrong] if wrong else []
    kept_lists = False
    for iteration in _candidates(folder, latest):
        state = state_of(folder, iteration, contents)
        if wrong == _ABSENT and not _has_list(state):
            # Without a tracker Megatron loads nothing. It may have been killed while writing this checkpoint.
            continue
        kept_lists = kept_lists or _has_list(state)
        if state.damage:
            passed.append(f"{state.path.name}: {state.damage}")
        elif state.listed or latest in (iteration, state.path.name) or (state.path / _LAST).is_file():
            return Choice(state, tuple(passed), contents and not _has_sums(state))
        else:
            passed.append(f"{state.path.name}: nothing says that it was written to its end")
    if wrong == _ABSENT and not kept_lists:  # a new folder: the job starts from scratch, as stock Megatron
        return Choice(None)
    raise RunError(
        f"no checkpoint in {folder} is whole ({_shortened(passed)}); name another folder, or begin anew in "
        "an empty one"
    )


def _has_sums(state: State) -> bool:
    return state.listed is not None and state.listed.has_sums


def _has_list(state: State) -> bool:
    return state.listed is not None or os.path.lexists(state.path / manifest.NAME)


def _shortened(passed: Sequence[str]) -> str:
    more = f"; and {len(passed) - _MOST} more" if len(passed) > _MOST else ""
    return "; ".join(passed[:_MOST]) + more


def _candidates(folder: Path, latest: int | str | None) -> Iterator[int | None]:
    """Yield the iterations of candidates in order of preference; ``None`` stands for ``release``.

    The tracker's iteration and older ones come first.
    """
    existing = iterations(folder)
    if latest == RELEASE:
        yield None
    if isinstance(latest, int):
        # The tracker's and older ones, newest first. Then newer ones.
        yield from sorted({latest, *(each for each in existing if each < latest)}, reverse=True)
        yield from (each for each in existing if each > latest)
    else:
        yield from existing


def describe(folder: Path, choice: Choice) -> str:
    """Format a choice as one line of text."""
    passed = f"; passed over: {_shortened(choice.passed)}" if choice.passed else ""
    if choice.state is None:
        return f"{folder} has no checkpoint yet"
    known = f"whole ({choice.state.listed})" if choice.state.listed else UNCHECKED
    sums = "; --verify-checkpoint compared no checksum, as it has none" if choice.unverified else ""
    return f"{folder}: {choice.state.path.name} is loaded: {known}{sums}{passed}"


def put_aside(path: Path) -> Path:
    """Rename a checkpoint before its deletion, so that no reader finds it; return the new path.

    Raises:
        OSError: it cannot be renamed.
    """
    return path.rename(beside(path.with_name(path.name.lstrip(".")), "deleted"))


def replaced(path: Path) -> Path:
    """Return the path that a checkpoint has while a new one is written in its place."""
    return path.with_name(f".{path.name}{_REPLACED}")


def put_back(folder: Path) -> None:
    """Rename checkpoints back in whose places an ended job has not written whole ones; delete the others.

    Raises:
        OSError: one of them cannot be renamed or deleted.
    """
    for iteration in (None, *(int(match[1]) for match in map(_ASIDE.fullmatch, os.listdir(folder)) if match)):
        aside = replaced(folder / name_of(iteration))
        state = state_of(folder, iteration)
        if aside.is_dir() and not state.damage:
            remove(aside)
        elif aside.is_dir():
            if state.path.is_dir():
                remove(state.path)
            aside.rename(state.path)


def remove(path: Path) -> None:
    """Delete a checkpoint; it is renamed first, so an interrupted deletion leaves no partial checkpoint.

    Raises:
        OSError: it cannot be deleted.
    """
    delete(put_aside(path))  # tolerates that another deletion has found the renamed folder


def superfluous(folder: Path, known: Sequence[State], keep: int) -> list[State]:
    """Return the checkpoints to delete: all that are older than the newest ``keep`` complete ones.

    The tracker's checkpoint is never deleted.

    Args:
        folder: parent folder of the checkpoints.
        known: states of its checkpoints, newest first.
        keep: number of complete checkpoints to keep, at least 1.

    Raises:
        RunError: a checkpoint to delete has no manifest, or has files that the manifest does not list.
    """
    latest, _ = tracked(folder)
    # Positions of the complete checkpoints, newest first. Without a manifest none counts as complete.
    whole = [position for position, state in enumerate(known) if state.listed and not state.damage]
    if len(whole) <= keep:
        return []
    old = [state for state in known[whole[keep - 1] + 1 :] if state.iteration != latest]
    for state in old:
        foreign = _foreign(state)
        if foreign:
            raise RunError(
                f"{state.path} {foreign}; nothing was deleted: move it elsewhere, or delete it by hand"
            )
    return old


def _foreign(state: State) -> str:
    """Describe why a folder must not be deleted; empty if it may be."""
    if state.path.is_symlink():
        return "is a link"
    if state.listed is None:
        return f"has no {manifest.NAME} that can be read"
    with contextlib.suppress(OSError):
        others = sorted(set(manifest.names(state.path)) - set(state.listed.files))
        return f"holds {others[0]}, which its manifest does not list" if others else ""
    return "cannot be read"
