"""Output of a run: lines or a progress bar, metrics, TensorBoard, a picture."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mindspeed_dsa
from dsa_job import folders
from dsa_job.flags import FUSED_PARTS, LOSS
from mindspeed_dsa import session
from mindspeed_dsa.features.moe.load_report import steps as load_report
from mindspeed_dsa.megatron.dsa import Options
from mindspeed_dsa.ops import backend
from mindspeed_dsa.runs import metrics
from mindspeed_dsa.runs.files import write_atomically
from mindspeed_dsa.runs.metrics import Record

HELDOUT = "heldout.jsonl"
PICTURE = "loss.png"


class Reporter:
    """Printer of a run's steps, unless ``quiet``, and writer of them to its folder, if there is one.

    Records of steps after ``iteration`` are dropped from the files, because those steps are repeated.
    """

    def __init__(self, args: argparse.Namespace, folder: Path | None, iteration: int, quiet: bool) -> None:
        self._args = args
        self._folder = folder
        self._quiet = quiet
        self._bar: Any = None
        self._writer: Any = None
        self.records: list[Record] = []
        self.heldout: list[Record] = []
        if folder is None:
            return
        for name, figure, kept in (
            (metrics.FILE, "lm_loss", self.records),
            (HELDOUT, "heldout_loss", self.heldout),
        ):
            records, warning = metrics.truncate(folder / name, iteration, [figure])
            kept += records
            if warning:
                self.say(warning)
        if not args.no_tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # TensorBoard drops its events of steps that are repeated.
            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=iteration + 1)

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.write(text)
        else:
            print(text, flush=True)

    def start(self, iteration: int) -> None:
        """Show a bar on a terminal."""
        if not self._quiet and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._args.train_iters, initial=iteration, unit="step", dynamic_ncols=True)

    def step(self, record: Record) -> None:
        """Record a completed training step."""
        self.records.append(record)
        self._write(metrics.FILE, record, "train")
        if self._bar is not None:
            self._bar.set_postfix(lm_loss=f"{record['lm_loss']:.3f}", refresh=False)
            self._bar.update()
        elif record["step"] % self._args.log_interval == 0 or record["step"] in (1, self._args.train_iters):
            self.say(line(record, self._args.train_iters))

    def evaluation(self, step: int, loss: float) -> None:
        """Record the held-out loss after a step; step 0 is before the first one."""
        record = {"step": step, "heldout_loss": loss}
        self.heldout.append(record)
        self._write(HELDOUT, record, "heldout")
        self.say(f"step {step:>5} | held-out loss {loss:.4f}")

    def finish(self, unigram_entropy: float, wall_s: float, library: Sequence[str] = ()) -> dict[str, Any]:
        """Write the summary, print it after the lines of ``library``, and draw the picture."""
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
                levels = {"unigram entropy": unigram_entropy}
                metrics.draw(self._folder / PICTURE, self.records, self.heldout, levels)
            write_atomically(self._folder / folders.SUMMARY, json.dumps(summary, indent=1) + "\n")
        for text in [*library, *describe(summary, self._folder)]:
            self.say(text)
        return summary

    def close(self) -> None:
        """Close bar and TensorBoard; may be called twice."""
        for output in (self._bar, self._writer):
            if output is not None:
                output.close()
        self._bar = self._writer = None

    def _write(self, name: str, record: Record, group: str) -> None:
        if self._folder is not None:
            metrics.append(self._folder / name, record)
        if self._writer is not None:
            for figure, value in record.items():
                if figure != "step" and value is not None:
                    label = "lm_loss" if figure == "heldout_loss" else figure
                    self._writer.add_scalar(f"{group}/{label}", value, record["step"])


def line(record: Record, steps: int) -> str:
    """Format one step as a line."""
    indexer = "" if record["indexer_loss"] is None else f" | indexer loss {record['indexer_loss']:.2e}"
    return (
        f"step {record['step']:>5}/{steps} | lm loss {record['lm_loss']:.4f}{indexer} | "
        f"grad norm {record['grad_norm']:.3f} | {record['tokens_per_s']:,.0f} tokens/s | "
        f"{record['step_time_s']:.3f} s | peak {record['peak_memory_bytes'] / 2**20:,.0f} MiB"
    )


def describe(summary: Mapping[str, Any], folder: Path | None) -> list[str]:
    """Format the summary as lines of text."""
    if summary["final_lm_loss"] is None:
        return ["no step was made"]
    lines = [
        "{steps} steps in {wall_s:.0f} s",
        "training loss {final_lm_loss:.4f} nats per token, mean of the last ten steps",
        "unigram entropy {unigram_entropy:.4f}: the loss of a model that knows only token frequencies",
    ]
    if summary["heldout_loss_first"] is not None:
        lines.append("held-out loss {heldout_loss_first:.4f} -> {heldout_loss_last:.4f}")
    texts = [text.format(**summary) for text in lines]
    return texts if folder is None else [*texts, f"everything about this run: {os.path.relpath(folder)}"]


class ExpertLoad:
    """Report of ``--moe-router-load-report``, if it is on; created before the model."""

    def __init__(self) -> None:
        running = session.current()
        self._context = None if running is None else running.contexts.get("moe-router-load-report")
        if self._context is not None:
            load_report.use_own_loop(self._context)

    def step(self, step: int) -> None:
        """Record a completed training step; all ranks call this together."""
        if self._context is not None:
            load_report.record_step(self._context, step)


class Account:
    """Summary of mindspeed_dsa's work on this rank: calls of sparse attention and of operators."""

    def __init__(self, model: Sequence[Any]) -> None:
        modules = [module for chunk in model for module in chunk.modules()]
        layers = [module for module in modules if type(module).__name__ == "DSAttention"]
        self._calls, self._layers = 0, len(layers)
        self._selecting = sum(layer.indexer is not None for layer in layers)
        self._before, self._seconds_before = backend.calls(), backend.seconds()
        self._start = time.perf_counter()
        for layer in layers:
            layer.register_forward_hook(self._count)

    def _count(self, *_: object) -> None:
        self._calls += 1

    def lines(self) -> list[str]:
        """Return the summary's lines: features with their patches, and operators that computed attention."""
        running = session.current()
        if running is None:
            return ["mindspeed_dsa: no feature was on"]
        # A patched place may still pass a call on to the original; only calls show work.
        patched = {feature.name: 0 for feature in running.features}
        for site in mindspeed_dsa.report():
            for name in patched.keys() & site["features"]:
                patched[name] += site["state"] == "applied"
        places = ", ".join(f"{name} ({count})" for name, count in patched.items() if count)
        lines = [f"mindspeed_dsa: {len(patched)} features on; places patched: {places or 'none'}"]
        if self._layers:
            lines.append(self._attention(running.settings))
        called = sorted((backend.calls() - self._before).items())
        if called:
            counts = (f"{operator} {count:,} on {name}" for (operator, name), count in called)
            lines.append(f"calls of operators on rank 0: {', '.join(counts)}")
        # Forward and backward of one process; the longest first.
        taken = backend.seconds()
        seconds = {name: taken[name] - self._seconds_before.get(name, 0.0) for name in taken}
        longest = sorted((-spent, name) for name, spent in seconds.items() if spent > 0)
        if longest:
            wall = time.perf_counter() - self._start
            shares = (f"{name} {-spent:.2f} s ({-100 * spent / wall:.0f} %)" for spent, name in longest)
            lines.append(f"time of operators on rank 0, of {wall:.1f} s: {', '.join(shares)}")
        return lines

    def _attention(self, settings: Any) -> str:
        """Describe the attention and its fused parts, among those that the training stage has."""
        options, everything = Options.of(settings), settings.use_fused_dsa
        switches = [(name, getattr(settings, name)) for name in FUSED_PARTS]
        without = {"dense": {*FUSED_PARTS}, "warmup": {*FUSED_PARTS} - {LOSS}, "frozen": {LOSS}}
        fused = [
            FUSED_PARTS[name]
            for name, on in switches
            if (everything if on is None else on) and name not in without.get(options.stage, ())
        ]
        kind = "dense" if options.attends_densely else "sparse"
        shared = "" if self._selecting == self._layers else f", of which {self._selecting} select keys,"
        if options.attends_densely and shared:
            shared = f", of which {self._selecting} have indexers,"
        return (
            f"{kind} attention: {self._calls:,} calls in {self._layers} layers{shared} on rank 0; fused: "
            f"{', '.join(fused) or 'nothing'}"
        )
