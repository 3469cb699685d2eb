"""One run that is disturbed, and restarted with the same command until it has finished."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.soak.attempt import Attempt, Failure
from tests.soak.damage import DAMAGE, TRACKER, folder_of, newest
from tests.soak.disturbances import KINDS, Planned, Scene, TooLate
from tests.soak.layouts import Command, Layout, Place, environment
from tests.soak.surroundings import Surroundings
from tests.soak.verdict import check_printed, check_results, check_resumed, check_said, passed_over

RESTARTS = 3
"""Number of restarts by torchrun itself, in half of the attempts."""


@dataclass
class Counts:
    """Counts so far.

    Attributes:
        finished: runs that ended like the unbroken one, by layout.
        disturbances: number of disturbances by kind.
        missed: disturbances that came after the job's end, by kind.
        starts: number of starts by ``command``, and by ``torchrun`` itself.
        passed_over: skipped checkpoints, by reason.
        steps_repeated: number of repeated steps, all runs together.
        seconds_lost: time beyond the unbroken run's, all finished runs together.
        slowest_end_s: longest time from the death of a rank to the end of all.
        kills_while_saving: kills of ranks, parents and writers during a save.
    """

    finished: Counter[str] = field(default_factory=Counter)
    disturbances: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    starts: Counter[str] = field(default_factory=Counter)
    passed_over: Counter[str] = field(default_factory=Counter)
    steps_repeated: int = 0
    seconds_lost: float = 0.0
    slowest_end_s: float = 0.0
    kills_while_saving: int = 0

    @property
    def kills(self) -> int:
        """Number of disturbances that are kills."""
        return sum(number for name, number in self.disturbances.items() if KINDS[name].kills)


@dataclass
class Unbroken:
    """The undisturbed run that others are compared with.

    Attributes:
        run: folder of the run.
        start_s: seconds to its first step.
        whole_s: seconds to its end.
    """

    run: Path
    start_s: float
    whole_s: float


@dataclass
class Trial:
    """A disturbed run.

    Attributes:
        layout: layout of its job.
        folder: folder on the disk that may fill up.
        printed: folder for output, on another disk.
        cache: folder of indexed text.
        command: factory of the job's command.
        around: disk and link.
        chance: random generator of everything.
        counts: counts to update.
        patience_s: seconds of patience of :class:`Attempt`.
        until: time of :func:`time.monotonic` after which no disturbance begins.
    """

    layout: Layout
    folder: Path
    printed: Path
    cache: Path
    command: Command
    around: Surroundings
    chance: random.Random
    counts: Counts
    patience_s: float
    until: float = float("inf")
    _damaged: dict[Path, int] = field(default_factory=dict)
    _words: str = ""
    _attempts: int = 0
    _reached: int = 0

    def unbroken(self) -> Unbroken:
        """Run the job to its end, undisturbed."""
        begin = time.monotonic()
        with self._start(0) as attempt:
            attempt.wait(lambda: attempt.step > 0)
            start_s = time.monotonic() - begin
            attempt.wait()
            self._end(attempt, [None], [])
            if attempt.code:
                raise Failure(f"the unbroken run ended with exit code {attempt.code}")
            return Unbroken(attempt.run, start_s, time.monotonic() - begin)

    def disturbed(self, planned: list[Planned], unbroken: Unbroken) -> None:
        """Run the job to its end with disturbances, and compare it with the unbroken run.

        Raises:
            Failure: the run differs from the unbroken one, or an earlier check failed.
        """
        planned, begin = list(planned), time.monotonic()
        while True:
            self.counts.starts["command"] += 1
            with self._start(self.chance.choice([0, RESTARTS])) as attempt:
                floors, said = [self._floor(attempt)], list[str]()
                last = self._disturb(attempt, planned, unbroken, floors, said)
                attempt.wait()
                self._end(attempt, floors, said)
                if attempt.code == 0:
                    break
                if last is None and not said:
                    raise Failure(f"the job ended with exit code {attempt.code}, and nobody had disturbed it")
            if last in DAMAGE:
                self._damage(attempt, last)
        check_results(attempt.run, unbroken.run)
        self.counts.finished[self.layout.name] += 1
        self.counts.seconds_lost += max(0.0, time.monotonic() - begin - unbroken.whole_s)

    def _start(self, restarts: int) -> Attempt:
        self._attempts += 1
        self.folder.mkdir(exist_ok=True)
        run, logs = self.folder / "run", self.printed / f"{self._attempts:02d}"
        command = self.command(self.layout, Place(run, logs, self.cache), restarts)
        return Attempt(command, logs, environment(), run, self.patience_s)

    def _floor(self, attempt: Attempt) -> int | None:
        return newest(attempt.checkpoints, self._damaged)

    def _disturb(
        self,
        attempt: Attempt,
        planned: list[Planned],
        unbroken: Unbroken,
        floors: list[int | None],
        said: list[str],
    ) -> str | None:
        """Apply planned disturbances while the launcher runs; return the last that ended a start."""
        last = None
        while planned and attempt.code is None and time.monotonic() < self.until:
            next_one = planned.pop(0)
            if not next_one.wait(attempt, unbroken.start_s):
                self.counts.missed[next_one.name] += 1
                break
            kind, start = KINDS[next_one.name], len(floors)
            print(f"  step {attempt.step}: {next_one.name}", flush=True)
            scene = Scene(attempt, self.chance, self.around)
            try:
                kind.act(scene)
            except (TooLate, psutil.NoSuchProcess):
                self.counts.missed[next_one.name] += 1
                continue
            self.counts.disturbances[next_one.name] += 1
            self.counts.kills_while_saving += kind.kills and next_one.moment == "save"
            said += scene.said
            self.counts.slowest_end_s = max(self.counts.slowest_end_s, scene.slowest_s)
            if not kind.goes_on:
                last = next_one.name
                floors.append(self._floor(attempt))
                # If torchrun restarts the ranks, the next disturbance hits the new ones.
                if next_one.name != "writer":  # it may have written everything
                    attempt.wait(lambda start=start: attempt.starts > start)
        return last

    def _end(self, attempt: Attempt, floors: list[int | None], said: list[str]) -> None:
        """Check the output and the files of an attempt."""
        attempt.look_for_orphans()
        printed = attempt.printed()
        check_printed(printed)
        check_said(printed, said)
        lines, reasons = passed_over(printed)
        for begun, reached in check_resumed(printed, floors):
            # Steps from the resumed one up to the last one reached before run a second time.
            self.counts.steps_repeated += max(0, self._reached - begun)
            if self._words and self._words not in lines and " more" not in lines:
                raise Failure(f"a damaged checkpoint was loaded, or not named: {self._words!r} is not said")
            self._words, self._reached = "", reached
        self.counts.passed_over.update(reasons)
        self.counts.starts["torchrun"] += attempt.starts - 1 if attempt.starts else 0

    def _damage(self, attempt: Attempt, kind: str) -> None:
        """Damage the newest checkpoint, unless no intact one would be left."""
        step = self._floor(attempt)
        if step is None:
            return
        checkpoint = folder_of(attempt.checkpoints, step)
        others = {**self._damaged, checkpoint: checkpoint.stat().st_ino}
        if kind != "tracker":
            if newest(attempt.checkpoints, others) is None:
                return
            self._damaged = others
        self._words = DAMAGE[kind](checkpoint, self.chance)
        print(f"  {TRACKER if kind == 'tracker' else checkpoint.name} is damaged: {self._words}", flush=True)
