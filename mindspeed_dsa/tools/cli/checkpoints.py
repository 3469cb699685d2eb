"""``checkpoints``: list the checkpoints of a folder, check them, and delete old ones."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.runs import whole_checkpoints
from mindspeed_dsa.runs.files import RunError, amount
from mindspeed_dsa.runs.whole_checkpoints import State
from mindspeed_dsa.session import start_report

_DESCRIPTION = """\
Lists the checkpoints in a folder of Megatron-LM's --save, and which of them are whole. A checkpoint that
--whole-checkpoints has written has a manifest of its files: their sizes are compared with it, and with
--verify the checksums that --verify-checkpoint has made. Ends with 1 if a checkpoint is damaged."""


def run(argv: Sequence[str]) -> int:
    """Print the table of checkpoints, and delete the old ones if ``--keep`` is given."""
    options = _parse(argv)
    folder: Path = options.folder
    iterations = whole_checkpoints.iterations(folder)
    numbered = _states(folder, iterations, options)
    states = [*numbered, *_release(folder, options.verify)]
    if not states:
        raise SettingsError(
            f"{folder} holds no checkpoints: there is no folder like iter_0000100 in it; name the folder "
            "that was given to --save"
        )
    latest, wrong = whole_checkpoints.tracked(folder)
    rows: list[tuple[str, ...]] = [("checkpoint", "files", "size", "state")]
    rows += [_row(state, latest, options.verify) for state in states]
    print("\n".join(start_report.aligned(rows)))
    if wrong:
        print(wrong)
    if options.keep is not None:
        _keep(folder, numbered, options.keep)
    return int(any(state.damage for state in states))


def _states(folder: Path, found: Sequence[int], options: argparse.Namespace) -> list[State]:
    """Check checkpoints, newest first. With ``--keep K``, read all bytes of the K newest complete ones."""
    # Checksums are compared before others are deleted: --keep must not rely on a damaged checkpoint.
    states: list[State] = []
    left = options.keep or 0  # whole checkpoints that --keep still has to find
    for iteration in found:
        state = whole_checkpoints.state_of(folder, iteration, options.verify or left > 0)
        left -= bool(state.listed and not state.damage)
        states.append(state)
    return states


def _release(folder: Path, verify: bool) -> list[State]:
    if not (folder / whole_checkpoints.RELEASE).is_dir():
        return []
    return [whole_checkpoints.state_of(folder, None, verify)]


def _row(state: State, latest: int | str | None, verified: bool) -> tuple[str, ...]:
    # The tracker file names either an iteration or the word "release".
    named = state.iteration == latest if state.iteration is not None else latest == whole_checkpoints.RELEASE
    if state.damage:
        text = f"damaged: {state.damage}"
    elif state.listed is None:
        text = "unknown: it has no manifest"
    else:
        read = "all files read" if state.listed.has_sums else "it has no checksums"
        text = f"whole, {read}" if verified else "whole"
    sizes = ("", "") if state.listed is None else (str(len(state.listed.files)), amount(state.listed.size))
    return (state.path.name, *sizes, f"{text}{', the latest' if named else ''}")


def _keep(folder: Path, known: Sequence[State], keep: int) -> None:
    old = whole_checkpoints.superfluous(folder, known, keep)
    for state in reversed(old):  # oldest first, so that an interruption leaves the newest
        try:
            whole_checkpoints.remove(state.path)
        except OSError as error:
            raise RunError(
                f"{state.path} cannot be deleted ({error.strerror or error}); see whose it is, and try again"
            ) from error
        print(f"{state.path.name} is deleted")
    if not old:
        print("nothing is deleted")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mindspeed_dsa checkpoints", description=_DESCRIPTION)
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder given to --save")
    parser.add_argument("--verify", action="store_true", help="read files and compare their checksums")
    parser.add_argument(
        "--keep",
        type=int,
        metavar="K",
        help="delete what is older than the K newest whole checkpoints, whose checksums are compared; never "
        "the newest whole one, the one that the tracker file names, or a folder with files that no manifest "
        "lists",
    )
    options = parser.parse_args(list(argv))
    if options.keep is not None and options.keep < 1:
        parser.error(f"--keep {options.keep}: at least 1 stays")
    return options
