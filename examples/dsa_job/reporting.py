"""What the user sees of a run, and what stays of it: lines or a bar, metrics, TensorBoard, a picture."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsa_job.files import write_atomically

METRICS = "metrics.jsonl"
HELDOUT = "heldout.jsonl"
PICTURE = "loss.png"
# What the summary and the picture read from each file.
_FIGURES = {METRICS: ("lm_loss",), HELDOUT: ("heldout_loss",)}
Record = Mapping[str, Any]
"""One step: ``step``, ``lm_loss`` and ``indexer_loss`` (nats per token), ``grad_norm``, ``tokens_per_s``,
``step_time_s``, ``peak_memory_bytes``. ``indexer_loss`` is ``None`` where the model computes none."""


class Reporter:
    """Writes everything about a run; on all ranks but the first it does nothing.

    Args:
        args: arguments of the job.
        folder: the run's folder; ``None`` writes no files.
        iteration: steps done before; what files say of later ones is dropped, because those steps
            come again.
        quiet: print nothing.
    """

    def __init__(self, args: argparse.Namespace, folder: Path | None, iteration: int, quiet: bool) -> None:
        self._args = args
        self._folder = folder
        self._quiet = quiet
        self._bar: Any = None
        self._files: dict[str, Any] = {}
        self._writer: Any = None
        self.heldout: list[Record] = []
        self.records: list[Record] = []
        if folder is None:
            return
        self.records = self._kept(METRICS, iteration)
        self.heldout = self._kept(HELDOUT, iteration)
        for name in (METRICS, HELDOUT):
            self._files[name] = open(folder / name, "a", encoding="utf-8")  # noqa: SIM115 - until close()
        if not args.no_tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=iteration + 1)

    def say(self, text: str) -> None:
        """Print a line; above the bar if there is one."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.write(text)
        else:
            print(text, flush=True)

    def start(self, iteration: int) -> None:
        """Steps begin: a bar on a terminal."""
        if not self._quiet and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._args.train_iters, initial=iteration, unit="step", dynamic_ncols=True)

    def step(self, record: Record) -> None:
        """One training step is done."""
        self.records.append(record)
        self._append(METRICS, record)
        if self._writer is not None:
            for name, value in record.items():
                if name != "step" and value is not None:
                    self._writer.add_scalar(f"train/{name}", value, record["step"])
        if self._bar is not None:
            self._bar.set_postfix(lm_loss=f"{record['lm_loss']:.3f}", refresh=False)
            self._bar.update()
        elif record["step"] % self._args.log_interval == 0 or record["step"] in (1, self._args.train_iters):
            self.say(line(record, self._args.train_iters))

    def evaluation(self, step: int, loss: float) -> None:
        """The held-out loss after a step; step 0 is before the first."""
        record = {"step": step, "heldout_loss": loss}
        self.heldout.append(record)
        self._append(HELDOUT, record)
        if self._writer is not None:
            self._writer.add_scalar("heldout/lm_loss", loss, step)
        self.say(f"step {step:>5} | held-out loss {loss:.4f}")

    def finish(self, unigram_entropy: float, wall_s: float, library: Sequence[str] = ()) -> dict[str, Any]:
        """Write and print the summary, and draw the picture.

        Args:
            unigram_entropy: of the training text, in nats per token.
            wall_s: seconds that the whole run took.
            library: lines on what mindspeed_dsa did in it, printed with the summary.
        """
        last = [record["lm_loss"] for record in self.records[-10:]]
        summary = {
            "unigram_entropy": unigram_entropy,
            "final_lm_loss": sum(last) / len(last) if last else None,
            "heldout_loss_first": self.heldout[0]["heldout_loss"] if self.heldout else None,
            "heldout_loss_last": self.heldout[-1]["heldout_loss"] if self.heldout else None,
            "steps": len(self.records),
            "wall_s": round(wall_s, 3),
        }
        self.close()
        if self._folder is not None:
            if self.records and not self._args.no_plot:
                draw(self._folder / PICTURE, self.records, self.heldout, unigram_entropy)
            # Last: the summary is what marks a run as finished.
            from dsa_job.runs import SUMMARY

            write_atomically(self._folder / SUMMARY, json.dumps(summary, indent=1) + "\n")
        for text in [*library, *describe(summary, self._folder)]:
            self.say(text)
        return summary

    def close(self) -> None:
        """Close files and bar; may be called twice."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for file in self._files.values():
            file.close()
        self._files = {}

    def _kept(self, name: str, iteration: int) -> list[Record]:
        assert self._folder is not None
        kept, damage = truncate(self._folder / name, iteration, _FIGURES[name])
        if damage:
            self.say(damage)
        return kept

    def _append(self, name: str, record: Record) -> None:
        file = self._files.get(name)
        if file is not None:
            file.write(json.dumps(record) + "\n")
            file.flush()  # a killed process leaves complete lines


def truncate(path: Path, iteration: int, figures: Sequence[str]) -> tuple[list[Record], str]:
    """Keep the lines up to a step, drop later and broken ones.

    Args:
        path: file of records, one JSON object a line.
        iteration: last step to keep.
        figures: what a record must hold beside its step.

    Returns:
        What is kept; and, if more is broken than the last line, which a killed process leaves unfinished, a
        sentence that says so and where the file as it was lies now.
    """
    if not path.exists():
        return [], ""
    content = path.read_bytes()
    lines = content.splitlines()
    records = [_record(text, figures) for text in lines]
    broken = [number for number, record in enumerate(records, start=1) if record is None]
    damage = ""
    if broken and broken != [len(lines)]:
        aside = path.with_name(f"{path.name}.damaged")
        aside.write_bytes(content)
        damage = (
            f"{path} is damaged: {len(broken)} of its {len(lines)} lines, line {broken[0]} first, are no "
            f"records of steps; the run goes on without them, and the file as it was is now {aside.name}"
        )
    kept = [record for record in records if record is not None and record["step"] <= iteration]
    write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))
    return kept, damage


def _record(text: bytes, figures: Sequence[str]) -> Record | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(record, dict) and all(_is_number(record.get(name)) for name in ("step", *figures))
    return record if whole else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def line(record: Record, steps: int) -> str:
    """One step in one line."""
    indexer = "" if record["indexer_loss"] is None else f" | indexer loss {record['indexer_loss']:.2e}"
    return (
        f"step {record['step']:>5}/{steps} | lm loss {record['lm_loss']:.4f}{indexer} | "
        f"grad norm {record['grad_norm']:.3f} | {record['tokens_per_s']:,.0f} tokens/s | "
        f"{record['step_time_s']:.3f} s | peak {record['peak_memory_bytes'] / 2**20:,.0f} MiB"
    )


def describe(summary: Mapping[str, Any], folder: Path | None) -> list[str]:
    """The summary for people."""
    if summary["final_lm_loss"] is None:
        return ["no step was made"]
    entropy, final = summary["unigram_entropy"], summary["final_lm_loss"]
    lines = [
        f"{summary['steps']} steps in {summary['wall_s']:.0f} s",
        f"training loss {final:.4f} nats per token, mean of the last ten steps",
        f"unigram entropy {entropy:.4f}: the loss of a model that knows only how often each token occurs",
    ]
    if summary["heldout_loss_first"] is not None:
        lines.append(
            f"held-out loss {summary['heldout_loss_first']:.4f} -> {summary['heldout_loss_last']:.4f}"
        )
    if folder is not None:
        lines.append(f"everything about this run: {os.path.relpath(folder)}")
    return lines


def draw(path: Path, records: list[Record], heldout: list[Record], unigram_entropy: float) -> None:
    """Losses over steps, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    steps = [record["step"] for record in records]
    axes.plot(steps, [record["lm_loss"] for record in records], label="training", linewidth=1)
    if heldout:
        axes.plot(
            [record["step"] for record in heldout],
            [record["heldout_loss"] for record in heldout],
            marker="o",
            label="held-out",
        )
    axes.axhline(unigram_entropy, linestyle="--", color="grey", linewidth=1, label="unigram entropy")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    indexer = [
        (record["step"], record["indexer_loss"]) for record in records if record["indexer_loss"] is not None
    ]
    if indexer:
        right = axes.twinx()
        right.plot(*zip(*indexer, strict=True), color="tab:green", linewidth=0.8, alpha=0.7)
        right.set_ylabel("indexer loss", color="tab:green")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
