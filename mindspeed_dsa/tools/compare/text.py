"""Text report and picture of a comparison of two sides, A and B."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_dsa.runs.metrics import Record, points, pyplot_for_files
from mindspeed_dsa.session.start_report import aligned

_ROWS = (
    ("step_time_s", "step time, median", lambda v: f"{v:.4g} s"),
    ("tokens_per_s", "tokens per second, median", lambda v: f"{v:,.0f}"),
    ("peak_memory_bytes", "peak memory, largest", lambda v: f"{v / 2**20:,.1f} MiB"),
)
_NAMES = {"lm_loss": "loss", "grad_norm": "gradient norm", "indexer_loss": "indexer loss"}


def table(result: dict[str, Any]) -> str:
    """Return the full report of a comparison after both sides ran."""
    lines = _sides(result)
    repeats = sum(run["name"].startswith("A") for run in result["runs"])
    rows = [("", "A", "B", "B / A")]
    for name, title, show in _ROWS:
        if name in result["measured"]:
            entry = result["measured"][name]
            rows.append((title, _spread(entry["A"], show), _spread(entry["B"], show), _ratio(entry["ratio"])))
    for name, title in _NAMES.items():
        if name in result["compared"]:
            last_a, last_b = result["compared"][name]["last"]
            rows.append((f"{title}, last step", _number(last_a), _number(last_b), ""))
    lines += ["", *aligned(rows), ""]
    skipped = result["steps"]["left_out_of_times"]
    of_steps = f"{result['steps']['A']} steps per run"
    lines.append(
        f"{repeats} run(s) per side, alternating, {of_steps}; the first {skipped} step(s) of each run are "
        "warm-up and excluded from the times"
    )
    lines.append(_on_noise(result, repeats))
    lines += ["", f"initial weights: {_same(result['initial_weights'])}"]
    lines += [f"{_NAMES[name]}: {_departure(found)}" for name, found in result["compared"].items()]
    return "\n".join([*lines, *_warnings(result)])


def failure(result: dict[str, Any]) -> str:
    """Return the report of a comparison after a run failed."""
    return "\n".join(
        [*_sides(result), *(f"FAILED {text}" for text in result["problems"]), *_warnings(result)]
    )


def _sides(result: dict[str, Any]) -> list[str]:
    lines = []
    for side, entry in result["sides"].items():
        lines.append(f"{side}: {shlex.join(entry['flags']) or '(no extra flags)'}")
    on_a, on_b = (result["sides"][side]["features_on"] for side in "AB")
    if on_a is not None and on_b is not None:
        for side, ours, others in (("A", on_a, on_b), ("B", on_b, on_a)):
            only = [name for name in ours if name not in others]
            lines.append(f"features on only in {side}: {', '.join(only) or 'none'}")
    return lines


def _spread(entry: dict[str, Any], show: Any) -> str:
    if len(entry["runs"]) < 2:
        return str(show(entry["median"]))
    return f"{show(entry['median'])} ({show(entry['min'])} to {show(entry['max'])})"


def _ratio(ratio: dict[str, Any]) -> str:
    if ratio["of_medians"] is None:
        return ""
    text = f"{ratio['of_medians']:.3f}"
    pairs = ratio["of_runs"]
    if len(pairs) > 1:
        text += f" ({min(pairs):.3f} to {max(pairs):.3f})"
    return text + (" within noise" if ratio["within_noise"] else "")


def _on_noise(result: dict[str, Any], repeats: int) -> str:
    quartiles = {
        side: result["measured"]["step_time_s"][side]["quartiles_of_steps"]
        for side in "AB"
        if "step_time_s" in result["measured"]
    }
    steps = "; ".join(f"{side} {low:.4g} to {high:.4g} s" for side, (low, high) in quartiles.items())
    middle = f"middle half of all steps: {steps}" if steps else "no step times"
    if repeats < 2:
        return f"{middle}; the spread is unknown with one run per side: use --repeats 3 or more"
    return f"{middle}; in parentheses: smallest and largest run"


def _same(found: dict[str, Any]) -> str:
    word = {True: "the same", False: "NOT THE SAME, so the losses cannot be compared", None: "not known"}
    return f"{word[found['same']]} ({found['how']})"


def _departure(found: dict[str, Any]) -> str:
    bad = [(side, step) for side, step in zip("AB", found["not_finite"], strict=True) if step is not None]
    nan = "".join(f"; {side} is not finite from step {step} on" for side, step in bad)
    if found["first_step"] is None:
        return f"equal to the last bit at all {found['steps']} steps{nan}"
    text = f"DIFFERS from step {found['first_step']} on"
    if found["max_abs"] is not None:
        text += f"; largest difference {found['max_abs']:.3g} at step {found['max_abs_step']}"
    if found["max_rel"] is not None:
        text += f", largest relative {found['max_rel']:.3g}"
    return text + nan + _own_noise(found["noise"])


def _own_noise(noise: dict[str, Any]) -> str:
    parts = []
    for side, entry in noise.items():
        if entry is not None and entry["first_step"] is not None and entry["max_abs"] is not None:
            parts.append(f"{side}'s by up to {entry['max_abs']:.3g} from step {entry['first_step']} on")
        elif entry is not None:
            parts.append(f"{side}'s not at all")
    return f"; runs of one side differ among themselves: {', '.join(parts)}" if parts else ""


def _warnings(result: dict[str, Any]) -> list[str]:
    return [f"WARNING: {text}" for text in result["warnings"]]


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, (int, float)) else str(value or "-")


_COLOURS = {"A": "tab:blue", "B": "tab:orange"}


def draw(path: Path, runs: dict[str, list[Record]]) -> bool:
    """Draw losses, their difference, step times and gradient norms of all runs.

    Args:
        path: PNG file.
        runs: dict from the run's name (``A1``, ``B1``, ...) to its records.

    Returns:
        False if matplotlib is not installed.
    """
    try:
        pyplot = pyplot_for_files()
    except ModuleNotFoundError:
        return False
    figure, grid = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for axes, name, title in (
        (grid[0][0], "lm_loss", "loss (nats per token)"),
        (grid[1][0], "step_time_s", "step time (s)"),
        (grid[1][1], "grad_norm", "gradient norm"),
    ):
        for run, records in runs.items():
            # One entry in the legend per side, not per run.
            label = run[0] if run[1:] == "1" else None
            axes.plot(*points(records, name), color=_COLOURS[run[0]], label=label, linewidth=1, alpha=0.8)
        axes.set(title=title, xlabel="step")
        axes.legend()
    _draw_difference(grid[0][1], runs["A1"], runs["B1"])
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def _draw_difference(axes: Any, a: Sequence[Record], b: Sequence[Record]) -> None:
    there = dict(zip(*points(b, "lm_loss"), strict=True))
    steps, losses = points(a, "lm_loss")
    pairs = [(step, there[step] - loss) for step, loss in zip(steps, losses, strict=True) if step in there]
    axes.axhline(0.0, color="grey", linewidth=0.5)
    axes.plot([step for step, _ in pairs], [gap for _, gap in pairs], color="black", linewidth=1)
    axes.set(title="loss of B minus loss of A", xlabel="step")
