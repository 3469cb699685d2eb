"""``try``: train a small model with Megatron's own and with the fused DSA, alternating after each step."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.runs.metrics import pyplot_for_files
from mindspeed_dsa.session.start_report import aligned
from mindspeed_dsa.tools.compare import job

SIDES = {"stock": "stock Megatron", "fused": "--use-fused-dsa"}
EQUAL = 1e-3
"""Largest accepted relative difference of a loss. Swapped keys with nearly equal scores cause about 1e-5."""
_LENGTH, _STEPS = 2048, 5
_QUICK = 512, 3
_MODULE = "mindspeed_dsa.tools.trial.side"
_NEEDED = {"torch": "torch", "megatron.core": "megatron-core"}
_OLDEST = "0.16"
_WARM_UP = 1  # the first step allocates, and chooses backends
_DESCRIPTION = """\
Trains one small model of DeepSeek-V3.2's shape twice, from the same weights and on the same text: with
Megatron's own sparse attention, and with this library's (--use-fused-dsa). Both are processes that take
turns, step by step. Prints tokens per second, peak memory and the losses, and draws them. The text is this
package's own sources; nothing is downloaded. Exit status: 0 the losses are the same, 1 they are not or a side
failed, 2 refused."""
Records = Mapping[str, Sequence[Mapping[str, float]]]


def run(argv: Sequence[str]) -> int:
    """Run both sides, print the table, write ``try.json`` and ``try.png``."""
    options = _parse(argv)
    missing = [name for module, name in _NEEDED.items() if not versions.is_importable(module)]
    if missing:
        raise SettingsError(
            f"mindspeed_dsa try: needs torch and megatron-core, and {' and '.join(missing)} "
            f"{'are' if len(missing) > 1 else 'is'} not installed: pip install 'mindspeed_dsa[megatron]'"
        )
    release = versions.of_megatron()
    if release is not None and Version(release) < Version(_OLDEST):
        raise SettingsError(
            "mindspeed_dsa try: compares with Megatron's own sparse attention, which begins with "
            f"megatron-core {_OLDEST}, and {release} is installed: pip install "
            f"'megatron-core>={_OLDEST},<0.20'. --use-fused-dsa itself serves {release}, too"
        )
    output = job.new_folder(Path(options.output_dir), "try")
    with contextlib.ExitStack() as running:
        sides = [running.enter_context(_started(side, options.seq_length, output)) for side in SIDES]
        try:
            about, _ = (side.answer() for side in sides)
            print(_headline(about, options.seq_length), flush=True)
            records: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
            for step in range(options.steps):
                for side in sides:
                    # One side at a time: the other waits for its line, so neither disturbs the other's times.
                    records[side.name].append(side.step())
                print(_line(step, records, options.seq_length), flush=True)
        except _SideFailedError as failed:
            print(failed, file=sys.stderr, flush=True)
            return 1
    result = summary(records, options.seq_length)
    result |= {"seq_length": options.seq_length, **about, "versions": versions.installed()}
    (output / "try.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    picture = output / "try.png"
    drawn = draw(picture, result)
    print("\n" + "\n".join([*table(result), "", str(output / "try.json")]))
    print(picture if drawn else "no picture without matplotlib: pip install 'mindspeed_dsa[viz]'")
    return 0 if result["largest_difference"] <= EQUAL else 1


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_dsa try",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--quick",
        action="store_true",
        help=f"{_QUICK[1]} steps of {_QUICK[0]} tokens: whether it runs at all",
    )
    add("--seq-length", type=int, metavar="N", help=f"tokens of a sequence (default: {_LENGTH})")
    add("--steps", type=int, metavar="N", help=f"steps of each side (default: {_STEPS})")
    add(
        "--output-dir",
        default="runs/try",
        metavar="DIR",
        help="if it exists, a number is appended, as in DIR-2",
    )
    options = parser.parse_args(list(argv))
    length, steps = _QUICK if options.quick else (_LENGTH, _STEPS)
    options.seq_length = length if options.seq_length is None else options.seq_length
    options.steps = steps if options.steps is None else options.steps
    if options.seq_length < 2:
        parser.error(f"--seq-length {options.seq_length}: use at least 2 tokens")
    if options.steps <= _WARM_UP:
        parser.error(f"--steps {options.steps}: use at least {_WARM_UP + 1}; the first is not timed")
    return options


class _SideFailedError(Exception):
    """Raised if a side's process ends early; the message has the last lines of its log."""


class _Side:
    """A subprocess that trains one side.

    Attributes:
        name: key of :data:`SIDES`.
        log: file with the process's standard error.
    """

    def __init__(self, name: str, log: Path, process: subprocess.Popen[bytes]) -> None:
        self.name, self.log, self._process = name, log, process

    def step(self) -> dict[str, float]:
        """Request one training step from the subprocess, and return the step's record."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # answer() reports a dead process with its log
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Read and parse the next line of JSON from the process."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(f"  {text}" for text in job.last_lines(self.log))
            raise _SideFailedError(
                f"mindspeed_dsa try: the side of {SIDES[self.name]} has ended with exit code "
                f"{self._process.wait()}; last lines of {self.log}:\n{tail}"
            )
        found: dict[str, Any] = json.loads(line)
        return found


@contextlib.contextmanager
def _started(name: str, length: int, output: Path) -> Iterator[_Side]:
    log = output / f"{name}.log"
    command = [sys.executable, "-m", _MODULE, name, str(length)]
    # Idle OpenMP threads of the waiting side would otherwise spin, and slow the other side down.
    environment = job.child_environment({"OMP_WAIT_POLICY": "passive"})
    pipe = subprocess.PIPE
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=errors, env=environment, start_new_session=True
        ) as process,
    ):
        try:
            yield _Side(name, log, process)
        finally:
            job.stop(process)


def summary(records: Records, length: int) -> dict[str, Any]:
    """Return losses, speed and peak memory of both sides, computed from their step records.

    Args:
        records: dict from side to one record per step: loss, seconds, peak memory in bytes.
        length: number of tokens per step.

    Returns:
        For each side its losses, tokens per second (median of the steps after the warm-up) and peak memory;
        and the largest relative difference of a loss.
    """
    sides = {}
    for name, steps in records.items():
        times = [step["step_time_s"] for step in steps[_WARM_UP:]]
        sides[name] = {
            "losses": [step["lm_loss"] for step in steps],
            "tokens_per_s": length / statistics.median(times),
            "peak_memory_bytes": max(step["peak_memory_bytes"] for step in steps),
        }
    pairs = zip(*(sides[name]["losses"] for name in SIDES), strict=True)
    differences = [abs(a - b) / abs(a) for a, b in pairs]
    # max() skips NaN unless it is first, because every comparison with NaN is false: sort NaN as largest.
    largest = max(differences, key=lambda each: (math.isnan(each), each))
    return {"sides": sides, "largest_difference": largest}


def table(found: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table that compares the two sides, from the result of :func:`summary`."""
    stock, fused = (found["sides"][name] for name in SIDES)
    speed = fused["tokens_per_s"] / stock["tokens_per_s"]
    memory = fused["peak_memory_bytes"] / stock["peak_memory_bytes"]
    peaks = [f"{side['peak_memory_bytes'] / 2**20:,.0f} MiB" for side in (stock, fused)]
    rows = [
        ("", *SIDES.values(), ""),
        (
            "tokens per second",
            *(f"{side['tokens_per_s']:,.0f}" for side in (stock, fused)),
            f"{speed:.2f} times",
        ),
        ("peak memory of the process", *peaks, f"{memory:.2f} of it"),
        ("loss, last step", *(f"{side['losses'][-1]:.6f}" for side in (stock, fused)), ""),
    ]
    gap, steps = found["largest_difference"], len(stock["losses"])
    same = "the same" if gap <= EQUAL else f"NOT THE SAME (more than {EQUAL:g})"
    return [*aligned(rows), "", f"losses of {steps} steps: {same}; largest relative difference {gap:.1e}"]


def draw(path: Path, found: Mapping[str, Any]) -> bool:
    """Draw speed, memory and losses into a PNG file; return False if matplotlib is not installed."""
    try:
        pyplot = pyplot_for_files()
    except ModuleNotFoundError:
        return False
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    colours = ("tab:grey", "tab:orange")
    sides = [found["sides"][name] for name in SIDES]
    for plot, name, unit, title in (
        (axes[0], "tokens_per_s", 1, "tokens per second"),
        (axes[1], "peak_memory_bytes", 2**20, "peak memory (MiB)"),
    ):
        bars = plot.bar(list(SIDES.values()), [side[name] / unit for side in sides], color=colours, width=0.6)
        plot.bar_label(bars, fmt="{:,.0f}")
        plot.set(title=title)
        plot.margins(y=0.15)
    steps = range(1, len(sides[0]["losses"]) + 1)
    for side, label, colour, style in zip(sides, SIDES.values(), colours, ("-", "--"), strict=True):
        axes[2].plot(steps, side["losses"], style, color=colour, label=label, linewidth=2)
    axes[2].set(title="loss (nats per byte)", xlabel="step")
    axes[2].legend()
    figure.suptitle(f"DeepSeek-V3.2 in small, {found['seq_length']} tokens, {found['device']}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def _headline(about: Mapping[str, Any], length: int) -> str:
    model = f"a model of DeepSeek-V3.2's shape with {about['parameters'] / 1e6:.1f} million parameters"
    found = versions.installed()
    names = ", ".join(f"{name} {found[name]}" for name in ("mindspeed_dsa", "megatron-core", "torch"))
    return f"{model}, sequences of {length} tokens, on {about['device']}\n{names}"


def _line(step: int, records: Records, length: int) -> str:
    parts = []
    for name, title in SIDES.items():
        last = records[name][step]
        parts.append(f"{title}: {length / last['step_time_s']:,.0f} tokens/s, loss {last['lm_loss']:.6f}")
    return f"step {step + 1}: {'; '.join(parts)}"
