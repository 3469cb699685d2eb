"""Disturbances of a job, and their times."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from tests.soak.attempt import Attempt
from tests.soak.damage import DAMAGE
from tests.soak.layouts import SAVE_INTERVAL, STEPS
from tests.soak.surroundings import Surroundings

END_S = 60.0
"""Seconds from a rank's death until all others have ended; two of torchrun's grace periods."""
ROOMS = 0, 16 << 10
"""Bytes left on a full disk."""
_DISK = r"No space left on device|File too large|the disk may be full"


class TooLate(Exception):
    """The target of a disturbance has already ended."""


@dataclass
class Scene:
    """A disturbance of an attempt.

    Attributes:
        attempt: disturbed attempt.
        chance: random generator for ranks and delays.
        around: disk and link.
        said: patterns that the ranks have to print because of it.
        slowest_s: longest time from a death to the end of all ranks, in seconds.
    """

    attempt: Attempt
    chance: random.Random
    around: Surroundings
    said: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the running ranks; raise TooLate if there are none."""
        if ranks := self.attempt.ranks():
            return ranks
        raise TooLate

    def ends(self, ranks: list[psutil.Process]) -> None:
        """Wait until the ranks have ended after the death of one."""
        self.slowest_s = max(self.slowest_s, self.attempt.wait_for_end_of(ranks, END_S))


def kill_rank(scene: Scene) -> None:
    """Kill one rank; the others must end."""
    ranks = scene.ranks()
    ranks[scene.chance.choice(sorted(ranks))].kill()
    scene.ends(list(ranks.values()))


def kill_parent(scene: Scene) -> None:
    """Kill the launcher and all of its processes, in random order."""
    while everything := scene.attempt.everything():  # some may start others meanwhile
        scene.chance.shuffle(everything)
        for process in everything:
            with contextlib.suppress(psutil.Error):
                process.kill()
        scene.ends(everything)


def kill_in_save(scene: Scene) -> None:
    """Kill a rank, or all, some milliseconds into a save."""
    time.sleep(scene.chance.uniform(0, 0.15))
    scene.chance.choice([kill_rank, kill_parent])(scene)


def kill_writer(scene: Scene) -> None:
    """Kill a process that writes a checkpoint, if one is left."""
    attempt, ranks, step = scene.attempt, scene.ranks(), scene.attempt.step
    attempt.wait(lambda: bool(attempt.writers()) or not attempt.is_saving())
    writers = attempt.writers()
    if not writers:
        raise TooLate
    scene.chance.choice(writers).kill()
    # It may have written everything already: then nothing happens.
    attempt.wait(lambda: attempt.step > step + SAVE_INTERVAL or not _any_runs(ranks))
    if not _any_runs(ranks) and attempt.code != 0:
        scene.said.append("its writer has ended without a word")


def _any_runs(ranks: dict[int, psutil.Process]) -> bool:
    return any(process.is_running() for process in ranks.values())


def terminate(scene: Scene) -> None:
    """Send SIGTERM to the launcher, or to one rank."""
    ranks = scene.ranks()
    victim = scene.chance.choice([scene.attempt.launcher, *ranks.values()])
    victim.send_signal(signal.SIGTERM)
    scene.ends(list(ranks.values()))


def stop(scene: Scene) -> None:
    """Stop a rank for some seconds; the job continues afterwards."""
    ranks = scene.ranks()
    victim = ranks[scene.chance.choice(sorted(ranks))]
    victim.suspend()
    time.sleep(scene.chance.uniform(1, 5))
    victim.resume()


def slow_link(scene: Scene) -> None:
    """Slow the link for some seconds; the job continues."""
    with scene.around.slow_link():
        end = time.monotonic() + scene.chance.uniform(2, 6)
        scene.attempt.wait(lambda: time.monotonic() > end)


def fill_disk(scene: Scene) -> None:
    """Leave no space on the disk until the job has ended, through all of its launcher's restarts."""
    scene.ranks()
    with scene.around.full_disk(scene.attempt.everything(), scene.chance.choice(ROOMS)):
        scene.attempt.wait()
    if scene.attempt.code:
        scene.said.append(_DISK)


@dataclass(frozen=True)
class Kind:
    """A kind of disturbance.

    Attributes:
        act: function that disturbs.
        moments: phases of a job in which it may happen: ``start``, ``step`` or ``save``.
        kills: whether it kills processes.
        goes_on: whether the same processes continue.
    """

    act: Callable[[Scene], None]
    moments: tuple[str, ...] = ("step",)
    kills: bool = True
    goes_on: bool = False


KINDS = {
    "rank": Kind(kill_rank, ("start", "step", "step")),
    "parent": Kind(kill_parent, ("start", "step", "step")),
    "save": Kind(kill_in_save, ("save",)),
    "writer": Kind(kill_writer, ("save",)),
    "term": Kind(terminate, ("start", "step", "step")),
    "stop": Kind(stop, ("start", "step"), kills=False, goes_on=True),
    "disk": Kind(fill_disk, kills=False),
    "link": Kind(slow_link, kills=False, goes_on=True),
    **{name: Kind(kill_parent) for name in DAMAGE},
}
"""Kinds by name. Damage begins with a kill, and the files are damaged while the job is down."""


@dataclass(frozen=True)
class Planned:
    """A planned disturbance.

    Attributes:
        name: name of its kind.
        moment: phase of the job.
        part: fraction, 0 to 1, of the start-up or of the remaining steps that passes before it.
    """

    name: str
    moment: str
    part: float

    def __str__(self) -> str:
        return f"{self.name} at a {self.moment}"

    def wait(self, attempt: Attempt, start_s: float) -> bool:
        """Wait for the moment; return False if the job ends first.

        Args:
            attempt: attempt to disturb.
            start_s: seconds that an undisturbed job needs to its first step.
        """
        if self.moment == "start":
            end = time.monotonic() + self.part * start_s
            return attempt.wait(lambda: time.monotonic() > end and bool(attempt.ranks()))
        if not attempt.wait(lambda: attempt.step > 0):
            return False
        # Sooner means more disturbances in a run. Damage to files needs at least two saves before it.
        step = attempt.step
        least = 2 * SAVE_INTERVAL + 1 if self.name in DAMAGE else 1
        wanted = min(max(step + int(self.part * (STEPS - step) / 2), least), STEPS - 2)
        if not attempt.wait(lambda: attempt.step >= wanted):
            return False
        return self.moment == "step" or attempt.wait(attempt.is_saving)


def draw(kinds: list[str], number: int, chance: random.Random) -> list[Planned]:
    """Draw ``number`` disturbances."""
    names = [chance.choice(kinds) for _ in range(number)]
    return [Planned(name, chance.choice(KINDS[name].moments), chance.random()) for name in names]
