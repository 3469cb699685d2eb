"""``selections search``: find the layers of a trained model that can do without an indexer."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mindspeed_dsa.features.dsa.selection_search.feature import SEARCH
from mindspeed_dsa.features.dsa.selection_search.greedy import (
    Request,
    Results,
    Step,
    for_engines,
)
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.runs.files import RunError
from mindspeed_dsa.runs.metrics import pyplot_for
from mindspeed_dsa.runs.whole_checkpoints import TRACKER, name_of, tracked
from mindspeed_dsa.session import start_report
from mindspeed_dsa.tools.compare import job

_WHO = "mindspeed_dsa selections search"
_DESCRIPTION = """\
Finds the layers of CHECKPOINT that can attend to the keys of a layer below. It starts with the job's own
pattern. Each step makes one more layer share: the one with the least loss on the job's data. Nothing is
trained or saved.

  python -m mindspeed_dsa selections search CHECKPOINT --layers-kept 4 -- torchrun pretrain.py FLAGS...

COMMAND is the job that trains the model. It is run once, with --load CHECKPOINT --finetune, and ends before
its first step. A search that was interrupted goes on where it was, with the same command. {out} in COMMAND is
replaced by the folder of --output.

Exit status: 0, or 1 if the job failed, 2 if something was refused."""
_POLL_S = 0.5


def run(argv: Sequence[str]) -> int:
    """Run the job that searches; print the steps, and write JSON and picture if requested."""
    options, command = _parse(list(argv))
    checkpoint = _checkpoint(options.checkpoint)
    if options.picture is not None:
        pyplot_for(options.picture)  # refused before the job runs
    output = options.output.resolve()
    try:
        output.mkdir(parents=True, exist_ok=True)
        Request(checkpoint, options.layers_kept, options.microbatches).write(output)
    except OSError as error:
        raise RunError(f"{_WHO}: --output {output} cannot be used: {error}") from None
    _unfinished(output)
    words = [word.replace(job.OUT, str(output)) for word in command]
    words += ["--load", str(options.checkpoint.resolve()), "--finetune", SEARCH, str(output)]
    with _bar(output), job.ending_with_us():
        done = job.execute("search", 1, output / "job", words, {}, None)
    if done.problem:
        lines = [f"{_WHO}: the job {done.problem}", *job.last_lines(done.log)]
        print("\n".join(lines), file=sys.stderr)
        return 1
    results = Results.read(output)
    if results is None or not results.is_done:
        print(
            f"{_WHO}: the job ended without a search; it must import mindspeed_dsa.megatron_adaptor, and "
            f"train at least one step with Megatron's schedules. Its output is in {output / 'job'}",
            file=sys.stderr,
        )
        return 1
    _tell(results, options)
    return 0


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    cut = argv.index("--") if "--" in argv else len(argv)
    words, command = argv[:cut], argv[cut + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_dsa selections search",
        description=_DESCRIPTION,
        usage="%(prog)s CHECKPOINT [options] -- COMMAND",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder of checkpoints")
    parser.add_argument(
        "--layers-kept",
        type=job.positive,
        metavar="N",
        help="layers with an indexer in the end; default: half of them",
    )
    parser.add_argument(
        "--microbatches",
        type=job.positive,
        default=8,
        metavar="M",
        help="microbatches of the job's data on each data parallel rank; default: 8",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/selections-search"),
        metavar="DIR",
        help="folder of results and of the job's output; default: runs/selections-search",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw them, e.g. search.png")
    options = parser.parse_args(words)
    if not command:
        parser.error("give the command of the job behind --")
    for path in (options.json, options.picture):
        if path is not None and not path.parent.is_dir():
            parser.error(f"{path} cannot be written: make the folder {path.parent} first")
    return options, command


def _checkpoint(folder: Path) -> str:
    """Return a text that tells the folder's newest checkpoint apart from others.

    Raises:
        SettingsError: the folder has no checkpoint.
    """
    latest, problem = tracked(folder)
    if latest is None:
        raise SettingsError(
            f"{_WHO}: {folder}: {problem}; name a folder that a job has saved into, with its {TRACKER}"
        )
    return str(folder.resolve() / (name_of(latest) if isinstance(latest, int) else latest))


def _unfinished(output: Path) -> None:
    """Mark earlier results as unfinished: if the job fails now, they are not taken for its own."""
    before = Results.read(output)
    if before is not None and before.is_done:
        before.is_done = False
        before.write(output)


@contextmanager
def _bar(output: Path) -> Iterator[None]:
    """Show the number of evaluations in the block, if tqdm is installed."""
    if find_spec("tqdm") is None:
        yield
        return
    from tqdm import tqdm  # type: ignore[import-untyped]

    before = Results.read(output)
    bar = tqdm(desc="search", unit=" evaluations", initial=0 if before is None else len(before.losses))
    ends = threading.Event()

    def look() -> None:
        while not ends.wait(_POLL_S):
            _show(output, bar)

    thread = threading.Thread(target=look, name="progress of the search", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
        _show(output, bar)
        bar.close()


def _show(output: Path, bar: Any) -> None:
    try:
        results = Results.read(output)
    except RunError:  # removed meanwhile; the job tells
        return
    if results is not None and (results.is_done or len(results.losses) > bar.n):
        # Patterns that two steps try are evaluated once.
        bar.total = len(results.losses) if results.is_done else max(results.planned, len(results.losses))
        bar.update(len(results.losses) - bar.n)


# -- results -------------------------------------------------------------------------------------


def _tell(results: Results, options: argparse.Namespace) -> None:
    """Print the table and the pattern, and write the requested files."""
    best = results.steps[-1]
    print("\n".join(start_report.aligned(_table(results.steps))))
    print()
    print(f"flags: {_flags(best)}")
    print(f"engines: index_topk_pattern {for_engines(best.pattern)}")
    begins = [layer for layer, letter in enumerate(best.pattern, 1) if letter == "C"]
    print(f"pipeline chunks can begin with layers {', '.join(map(str, begins))}")
    if len(results.firsts) > 1:
        print(f"layers {', '.join(map(str, results.firsts))} begin a chunk of this job, and were not tried")
    export = f"python -m mindspeed_dsa weights export {options.checkpoint} HF_DIR {_flags(best)}"
    print(f"files for engines: {export}")
    if options.json is not None:
        report = {
            "job": results.identity,
            "layers_kept": best.kept,
            "pattern": best.pattern,
            "flags": _flags(best),
            "index_topk_pattern": for_engines(best.pattern),
            "chunks_begin": results.firsts,
            "evaluations": len(results.losses),
            "steps": [asdict(step) for step in results.steps],
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"\n{options.json}")
    if options.picture is not None:
        _draw(options.picture, results.steps)
        print(f"\n{options.picture} shows them")


def _flags(step: Step) -> str:
    return f"--dsa-indexer-topk-pattern {step.pattern}"


def _table(steps: Sequence[Step]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("layers kept", "pattern", "loss", "layer removed", "uniform pattern", "its loss")
    ]
    for step in steps:
        removed = "-" if step.removed is None else str(step.removed)
        even = "-" if step.uniform_loss is None else f"{step.uniform_loss:.6f}"
        rows.append((str(step.kept), step.pattern, f"{step.loss:.6f}", removed, step.uniform or "-", even))
    return rows


def _draw(path: Path, steps: Sequence[Step]) -> None:
    """Plot the loss over the number of layers kept, searched and uniform."""
    pyplot = pyplot_for(path)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    counts = [step.kept for step in steps]
    axes.plot(counts, [step.loss for step in steps], marker="o", label="searched")
    even = [(step.kept, step.uniform_loss) for step in steps if step.uniform_loss is not None]
    if even:
        axes.plot(*zip(*even, strict=True), marker="s", linestyle="--", label="uniform")
    axes.set(xlabel="layers with an indexer", ylabel="calibration loss", title=steps[-1].pattern)
    # Steps go from left to right: fewer indexers with each.
    axes.invert_xaxis()
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
