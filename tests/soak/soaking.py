"""The soak: runs of all layouts, one after the other, for a given time; prints counts at the end."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.soak.attempt import Failure
from tests.soak.disturbances import KINDS, draw
from tests.soak.launcher import example_job, forks, prepare
from tests.soak.layouts import LAYOUTS, Command, torchrun
from tests.soak.surroundings import Surroundings
from tests.soak.trial import Counts, Trial, Unbroken


def parser() -> argparse.ArgumentParser:
    """Return the command line parser."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description="Disturb the example job at random, start it again, and compare it with an unbroken run.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="no run begins after that")
    parser.add_argument("--runs", type=int, help="at most so many; unset: any number")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is drawn")
    parser.add_argument("--first", type=int, default=1, help="number of the first run, to repeat one")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of disturbances")
    parser.add_argument("--disturbances", type=int, default=8, help="of each run")
    parser.add_argument(
        "--patience", type=float, default=300.0, help="seconds without a step that are a hang"
    )
    parser.add_argument(
        "--launcher",
        choices=("torchrun", "forks"),
        default="torchrun",
        help="forks: one like it, whose ranks begin with everything imported; several times as many kills",
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/soak"), help="of what failed, and counts.json"
    )
    return parser


def main(argv: Sequence[str] | None = None, command: Command | None = None) -> int:
    """Run the soak; return 0 if all runs ended like the unbroken one, 1 if one did not or none finished."""
    args = parser().parse_args(argv)
    if command is None and args.launcher == "forks":
        prepare()
    soak = Soak(args, command or {"forks": forks(example_job), "torchrun": torchrun}[args.launcher])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no job is left then, either
    try:
        soak.run()
    except KeyboardInterrupt:
        print("stopped by a signal", flush=True)
    result = soak.result()
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "counts.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)
    return int(bool(soak.failures) or not soak.counts.finished)


class Soak:
    """All runs of a soak.

    Args:
        args: parsed arguments of :func:`parser`.
        command: factory of the job's command.
    """

    def __init__(self, args: argparse.Namespace, command: Command) -> None:
        self.args, self.command = args, command
        self.folder = args.folder.resolve()
        for name in ("disk", "printed"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        self.around = Surroundings(self.folder / "disk")
        for what, why in self.around.skipped.items():
            print(f"skipped: {what} ({why})", flush=True)
        self.kinds = [kind for kind in args.kinds if kind != "link" or self.around.has_link]
        self.counts = Counts()
        self.failures: list[dict[str, Any]] = []
        self.unbroken: dict[str, Unbroken] = {}
        self._begin = time.monotonic()
        self._until = self._begin + 60 * args.minutes

    def run(self) -> None:
        """Make runs until the time is over."""
        number = self.args.first
        while time.monotonic() < self._until:
            if self.args.runs is not None and number >= self.args.first + self.args.runs:
                return
            self._one(number)
            number += 1

    def result(self) -> dict[str, Any]:
        """Return the counts."""
        return {
            "seed": self.args.seed,
            "minutes": round((time.monotonic() - self._begin) / 60, 1),
            "runs_finished": sum(self.counts.finished.values()),
            "kills": self.counts.kills,
            **{
                name: dict(value) if isinstance(value, dict) else round(value, 1)
                for name, value in vars(self.counts).items()
            },
            "unbroken_s": {name: round(each.whole_s, 1) for name, each in self.unbroken.items()},
            "skipped": self.around.skipped,
            "failures": self.failures,
        }

    def _one(self, number: int) -> None:
        args = self.args
        layout = LAYOUTS[args.layouts[(number - 1) % len(args.layouts)]]
        chance = random.Random(f"{args.seed}-{number}")
        planned = draw(self.kinds, args.disturbances, chance)
        folder = self.around.disk / f"run-{number}"
        try:
            if layout.name not in self.unbroken:
                print(f"unbroken run of {layout.name}", flush=True)
                self.unbroken[layout.name] = self._trial(layout.name, layout.name, chance).unbroken()
            print(
                f"run {number}, seed {args.seed}, {layout.name}: {', '.join(map(str, planned))}", flush=True
            )
            self._trial(layout.name, folder.name, chance).disturbed(planned, self.unbroken[layout.name])
        except Failure as failure:
            self._keep(
                number, layout.name, folder if folder.exists() else folder.with_name(layout.name), failure
            )
        else:
            print(f"run {number} has ended as the unbroken one", flush=True)
            shutil.rmtree(folder)
            shutil.rmtree(self.folder / "printed" / folder.name)

    def _trial(self, layout: str, name: str, chance: random.Random) -> Trial:
        return Trial(
            LAYOUTS[layout],
            self.around.disk / name,
            self.folder / "printed" / name,
            self.around.disk / "data-cache",
            self.command,
            self.around,
            chance,
            self.counts,
            self.args.patience,
            self._until,
        )

    def _keep(self, number: int, layout: str, folder: Path, failure: Failure) -> None:
        """Keep the files of a failed run, as its disk goes away when the soak ends."""
        kept = self.folder / f"failed-{self.args.seed}-{number}"
        shutil.rmtree(kept, ignore_errors=True)
        if folder.exists():
            shutil.copytree(folder, kept, symlinks=True)
            shutil.rmtree(folder)
        shutil.move(self.folder / "printed" / folder.name, kept / "printed")
        what = {
            "run": number,
            "seed": self.args.seed,
            "layout": layout,
            "what": str(failure),
            "folder": str(kept),
        }
        self.failures.append(what)
        print(f"run {number} FAILED: {failure}; all of it is in {kept}", flush=True)
