"""Jobs that ``compare`` can run: their command lines, and their execution as subprocesses."""

from __future__ import annotations

import argparse
import os
import re
import signal
import site
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.runs.metrics import FILE as METRICS

WEIGHTS = "weights"
OUT = "{out}"
"""Placeholder for the run's folder in a job's command."""
_LAUNCHERS_LINE = re.compile(r"[IWE]\d{4} \S+ \d+ \S*torch/distributed/(run|elastic/\S*)\.py:\d+\]")
_LAUNCHERS_REPORT = re.compile(_LAUNCHERS_LINE.pattern + r" failed \(exitcode: ")
_PATIENCE_S = 30.0
_PACKAGE_PARENT = Path(__file__).resolve().parents[3]
EXAMPLE = _PACKAGE_PARENT / "examples" / "pretrain_dsa.py"


@dataclass(frozen=True)
class ExampleJob:
    """The example job ``examples/pretrain_dsa.py``; all runs load the same initial weights."""

    flags: tuple[str, ...] = ()
    nproc: int = 1
    script: Path = EXAMPLE

    def __post_init__(self) -> None:
        if not self.script.is_file():
            raise SettingsError(
                f"mindspeed_dsa compare: there is no {self.script}: this installation has no examples; "
                "run in a checkout of the repository, or give your job's command after --"
            )

    @property
    def metrics(self) -> str:
        return f"job/{METRICS}"  # the job requires a separate folder

    @property
    def on_by_default(self) -> tuple[str, ...]:
        """Switches of this library that the job sets itself; ``--no-...`` switches them off."""
        return ("--use-fused-dsa",)

    def prepare(self, output: Path, flags: Sequence[str]) -> list[str] | None:
        """Return the command that writes initial weights for all runs into ``output``, or None."""
        if self._has("--load"):
            return None
        # Zero iterations: build the model, save it, end.
        return [*self._start(), *flags, "--train-iters", "0", "--save", str(output / "initial")]

    def command(self, output: Path, folder: Path, flags: Sequence[str]) -> list[str]:
        command = self._start()
        for name, *value in (("--train-iters", "30"), ("--eval-iters", "0"), ("--log-interval", "1")):
            if not self._has(name):
                command += [name, *value]
        command += ["--no-save", "--no-plot", "--no-tensorboard", "--new-run"]
        command += ["--output-dir", str(folder / Path(self.metrics).parent)]
        command += ["--data-cache-path", str(output / "data-cache"), "--finetune"]
        if not self._has("--load"):
            command += ["--load", str(output / "initial")]
        return [*command, *flags]

    def environment(self, folder: Path) -> dict[str, str]:
        return {}

    def _start(self) -> list[str]:
        return [*launcher(self.nproc), str(self.script), *self.flags]

    def _has(self, name: str) -> bool:
        return any(token.partition("=")[0] == name for token in self.flags)


@dataclass(frozen=True)
class CommandJob:
    """Any other command, with initial weights from its own seed or checkpoint.

    Attributes:
        words: command line; ``{out}`` is replaced by the run's folder.
        nproc: number of processes, for a command that begins with a Python script.
        own_metrics: file inside ``{out}`` with the job's own records, or None to have the feature
            step-metrics write records.
    """

    words: tuple[str, ...]
    nproc: int | None = None
    own_metrics: str | None = None

    def __post_init__(self) -> None:
        if not self.words[0].endswith(".py") and self.nproc is not None:
            raise SettingsError(
                "mindspeed_dsa compare: --nproc is for a job that is given as a Python script; "
                f"{self.words[0]!r} starts its processes itself, so set their number there"
            )
        if self.own_metrics and not any(OUT in word for word in self.words):
            raise SettingsError(
                f"mindspeed_dsa compare: --metrics-file {self.own_metrics} is in the run's folder, and the "
                f"job needs its path: use {OUT} in its command, e.g. --output-dir {OUT}"
            )

    @property
    def metrics(self) -> str:
        return self.own_metrics or METRICS

    @property
    def on_by_default(self) -> tuple[str, ...]:
        return ()

    def prepare(self, output: Path, flags: Sequence[str]) -> list[str] | None:
        return None

    def command(self, output: Path, folder: Path, flags: Sequence[str]) -> list[str]:
        words = [word.replace(OUT, str(folder)) for word in self.words]
        start = launcher(self.nproc or 1) if words[0].endswith(".py") else []
        return [*start, *words, *flags]

    def environment(self, folder: Path) -> dict[str, str]:
        return {} if self.own_metrics else {"MINDSPEED_DSA_STEP_METRICS_FILE": str(folder / METRICS)}


Job = ExampleJob | CommandJob
"""A job that can be run repeatedly with different flags."""


def positive(text: str) -> int:
    """Return the number of a command line option, for argparse.

    Raises:
        argparse.ArgumentTypeError: the number is below 1.
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def launcher(nproc: int) -> list[str]:
    """Return the words that start a Python script in this interpreter, under torchrun if ``nproc`` > 1."""
    if nproc == 1:
        return [sys.executable]
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    return [sys.executable, *run]


@dataclass
class Run:
    """One finished run of the job, with the flags of one side of a comparison."""

    side: str
    repeat: int
    folder: Path
    command: list[str]
    exit_code: int
    wall_s: float
    problem: str = ""
    """Reason of a failure; empty if there was none."""

    @property
    def name(self) -> str:
        """Name of the run: ``initial``, ``A1``, ``B1``, ``A2``, ..."""
        return f"{self.side}{self.repeat}" if self.repeat else "initial"

    @property
    def log(self) -> Path:
        """File with the run's standard error."""
        return self.folder / "stderr.txt"


def execute(
    side: str,
    repeat: int,
    folder: Path,
    command: list[str],
    environment: Mapping[str, str],
    timeout_s: float | None,
) -> Run:
    """Run a command as a subprocess, with its output in ``stdout.txt`` and ``stderr.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    env = child_environment(environment)
    begin = time.monotonic()
    with open(folder / "stdout.txt", "wb") as out, open(folder / "stderr.txt", "wb") as err:
        try:
            process = subprocess.Popen(command, stdout=out, stderr=err, env=env, start_new_session=True)
        except OSError as error:
            return Run(side, repeat, folder, command, 127, 0.0, f"{command[0]} cannot be started: {error}")
        problem = ""
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            problem = f"was stopped after {timeout_s:.0f} s (--timeout)"
            stop(process)
        except BaseException:  # Ctrl-C does not reach a separate session
            stop(process)
            raise
    wall = time.monotonic() - begin
    if not problem and process.returncode != 0:
        problem = f"ended with exit code {process.returncode}"
    return Run(side, repeat, folder, command, process.returncode, wall, problem)


def child_environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a subprocess can import this package from any working directory."""
    env = {**os.environ, **more}
    # In a checkout that is not installed, the import only works from its folder.
    if not _is_installed():
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_PACKAGE_PARENT), env.get("PYTHONPATH")]))
    return env


def new_folder(wanted: Path, command: str) -> Path:
    """Create and return the folder ``wanted``; if it exists, ``wanted-2``, ``wanted-3``, and so on.

    Raises:
        SettingsError: the folder cannot be made; the message begins with ``command``.
    """
    wanted = wanted.resolve()
    number = 1
    while True:
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            # An empty folder may have been made for this run.
            if folder.is_dir() and not any(folder.iterdir()):
                return folder
            number += 1
        except OSError as error:
            raise SettingsError(
                f"mindspeed_dsa {command}: --output-dir {wanted} cannot be used: {error}"
            ) from None


def ours(folder: Path) -> dict[str, str]:
    """Return the variables that make this library write its start report and weight digests to ``folder``."""
    return {
        "MINDSPEED_DSA_MINDSPEED_REPORT_DIR": str(folder),
        "MINDSPEED_DSA_INITIAL_WEIGHTS_DIR": str(folder / WEIGHTS),
    }


def last_lines(path: Path, count: int = 30) -> list[str]:
    """Return the last lines of a job's log, leaving out torchrun's report at its end."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    report = next((at for at, line in enumerate(lines) if _LAUNCHERS_REPORT.match(line)), len(lines))
    words = [line for line in lines[:report] if not _LAUNCHERS_LINE.match(line)]
    # If torchrun wrote every line, its report is better than nothing.
    return (words or lines)[-count:]


def _is_installed() -> bool:
    return str(_PACKAGE_PARENT) in [*site.getsitepackages(), site.getusersitepackages()]


@contextmanager
def ending_with_us() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C inside the block, so that the running job is stopped, too."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a job and all its processes; torchrun stops its workers on SIGTERM."""
    # torchrun and the workers share one session, so the signal reaches the whole process group.
    for number, patience in ((signal.SIGTERM, _PATIENCE_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
            return
        except ProcessLookupError:
            process.wait()
            return
        except subprocess.TimeoutExpired:
            continue
