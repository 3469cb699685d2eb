"""Folders of checkpoints as Megatron-LM lays them out, and which checkpoint of one is whole.

A folder has ``iter_0000100`` and so on, perhaps ``release``, and a tracker file that names the latest.
Imports neither torch nor Megatron.
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
"""Megatron's name of a checkpoint that no job has written: loaded without optimizer, from step 0 on."""
UNCHECKED = f"it has no {manifest.NAME}, as Megatron alone writes it, and is taken unchecked"
_ITERATION = re.compile(r"iter_(\d{7,18})")
_LAST = "metadata.json"
"""What Megatron writes last into a distributed checkpoint."""
_INDEX = ".metadata"
_SHARDS = re.compile(rb"__\d+_\d+\.distcp")
"""Names of files in an index of torch's, of which each text is written in one piece."""
_SHOWN = 40  # characters of a damaged file that a message repeats
_MOST = 3  # checkpoints that a message names
_ABSENT = f"there is no {TRACKER}"


@dataclass(frozen=True)
class State:
    """A checkpoint as far as it is known without loading it.

    Attributes:
        path: its folder.
        iteration: ``None`` for ``release``.
        damage: in words; empty if it is whole, or not known to be damaged.
        listed: its manifest; ``None`` where it has none that can be read.
    """

    path: Path
    iteration: int | None
    damage: str
    listed: manifest.Manifest | None


@dataclass(frozen=True)
class Choice:
    """A checkpoint to load.

    Attributes:
        state: of the checkpoint; ``None`` where the folder has none, and no tracker.
        passed: in words, each that was passed over, and why.
        unverified: checksums were to be compared, and it has none.
    """

    state: State | None
    passed: tuple[str, ...] = ()
    unverified: bool = False


def name_of(iteration: int | None) -> str:
    """Return the name of a checkpoint's folder; ``None`` is ``release``."""
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def tracked(folder: Path) -> tuple[int | str | None, str]:
    """Read a tracker file.

    Returns:
        The iteration, or ``release``, or ``None``; and in words what is wrong with the file, or nothing.
    """
    try:
        with open(folder / TRACKER, "rb") as file:
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
    """Return whether the tracker names a checkpoint's folder."""
    latest, _ = tracked(folder)
    return name == (name_of(latest) if isinstance(latest, int) else latest)


def iterations(folder: Path) -> list[int]:
    """Return the iterations of all folders that are named like checkpoints, the newest first.

    Raises:
        RunError: the folder cannot be read.
    """
    try:
        found = [_ITERATION.fullmatch(entry.name) for entry in os.scandir(folder)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(
            f"{folder} cannot be read ({error.strerror or error}); name a folder that holds checkpoints"
        ) from error
    return sorted((int(match[1]) for match in found if match), reverse=True)


def state_of(folder: Path, iteration: int | None, contents: bool = False) -> State:
    """Check one checkpoint.

    Args:
        folder: that it lies in.
        iteration: ``None`` for ``release``.
        contents: read all of its files.
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
    """Return in words what a checkpoint of Megatron alone lacks that loading would certainly miss."""
    if not path.is_dir():
        return "it is missing"
    with os.scandir(path) as entries:
        found = {entry.name for entry in entries}
    if found & {_LAST, _INDEX}:
        return _incomplete(path, found)
    ranks = sorted(name for name in found if name.startswith("mp_rank_"))
    if not ranks:
        return "it was not written to its end"
    for name in ranks:
        if (path / name).is_dir() and not os.listdir(path / name):
            return f"{name} is empty"
    return "" if ranks[0].startswith("mp_rank_00") else "mp_rank_00 is missing"


def _incomplete(path: Path, found: set[str]) -> str:
    """Return in words what of a distributed checkpoint has gone, as when it was deleted and that was killed.

    Its index names the files; what it is pickled with is not read.
    """
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
        return ""  # of which Megatron speaks
    return f"{_INDEX} is missing" if kind == "torch_dist" and _INDEX not in found else ""


def choose(folder: Path, step: int | None = None, contents: bool = False) -> Choice:
    """Choose the checkpoint to load: the newest whole one that the tracker's iteration does not precede.

    Newer ones than the tracker says count only where no other is whole: a tracker may have been set back.
    One without a manifest counts where the tracker names it, and else if Megatron has written its last file.

    Args:
        folder: of checkpoints.
        step: this one alone.
        contents: compare checksums of those that come into question, besides sizes.

    Raises:
        RunError: none is whole, in one line; or the folder cannot be read.
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
            continue  # without a tracker Megatron loads nothing, and may have been killed while it wrote this
        kept_lists = kept_lists or _has_list(state)
        if state.damage:
            passed.append(f"{state.path.name}: {state.damage}")
        elif state.listed or latest in (iteration, state.path.name) or (state.path / _LAST).is_file():
            return Choice(state, tuple(passed), contents and not _has_sums(state))
        else:
            passed.append(f"{state.path.name}: nothing says that it was written to its end")
    if wrong == _ABSENT and not kept_lists:
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
    """Yield what may be loaded, in the order of preference; what the tracker names is among it."""
    found = iterations(folder)
    if latest == RELEASE:
        yield None
    if isinstance(latest, int):
        yield from sorted({latest, *(each for each in found if each < latest)}, reverse=True)
        yield from (each for each in found if each > latest)
    else:
        yield from found


def describe(folder: Path, choice: Choice) -> str:
    """Return a choice in one line."""
    passed = f"; passed over: {_shortened(choice.passed)}" if choice.passed else ""
    if choice.state is None:
        return f"{folder} has no checkpoint yet"
    known = f"whole ({choice.state.listed})" if choice.state.listed else UNCHECKED
    sums = "; --verify-checkpoint compared no checksum, as it has none" if choice.unverified else ""
    return f"{folder}: {choice.state.path.name} is loaded: {known}{sums}{passed}"


def put_aside(path: Path) -> Path:
    """Rename a checkpoint that is to be deleted; return its new name, which is no checkpoint's.

    Raises:
        OSError: it cannot be renamed.
    """
    return path.rename(beside(path, "deleted"))


def remove(path: Path) -> None:
    """Delete a checkpoint; killed on the way, what is left of it has no checkpoint's name.

    Raises:
        OSError: it cannot be deleted.
    """
    delete(put_aside(path))  # which the next deletion may have found


def superfluous(folder: Path, known: Sequence[State], keep: int) -> list[State]:
    """Return which checkpoints may be deleted: those that are older than the newest whole ones.

    What the tracker names stays.

    Args:
        folder: of checkpoints.
        known: those of iterations, the newest first.
        keep: how many whole ones stay; at least 1.

    Raises:
        RunError: a folder among those to be deleted has no manifest, or files that its manifest does not
            list.
    """
    latest, _ = tracked(folder)
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
    """Return in words why a folder is not deleted."""
    if state.path.is_symlink():
        return "is a link"
    if state.listed is None:
        return f"has no {manifest.NAME} that can be read"
    with contextlib.suppress(OSError):
        others = sorted(set(manifest.names(state.path)) - set(state.listed.files))
        return f"holds {others[0]}, which its manifest does not list" if others else ""
    return "cannot be read"
