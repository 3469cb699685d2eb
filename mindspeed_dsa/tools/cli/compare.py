"""``compare``: run the same job with and without the named features, and compare the records."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.runs import metrics
from mindspeed_dsa.runs.metrics import Record
from mindspeed_dsa.tools.compare import job, result, sides, text
from mindspeed_dsa.tools.compare.job import CommandJob, ExampleJob, Job, Run
from mindspeed_dsa.tools.compare.sides import Sides

_DESCRIPTION = """\
Runs one job as two sides, A and B, each run in a fresh process, and reports the differences: step time,
memory, loss, gradient norm. The job is examples/pretrain_dsa.py, with additional flags, or any command:

  python -m mindspeed_dsa compare --features recompute-norm --repeats 3 --train-iters 50
  python -m mindspeed_dsa compare --a "" --b "--bf16"
  python -m mindspeed_dsa compare --features recompute-norm -- torchrun --nproc-per-node 2 pretrain.py ...

The flags of a side are appended to the job's command line. Your own command must import
mindspeed_dsa.megatron_adaptor; {out} in it is replaced by the run's folder. Exit status: 0 both sides ran, 1
one of them failed, 2 refused."""


def run(argv: Sequence[str]) -> int:
    """Run both sides alternately, print the table, write ``compare.json`` and ``compare.png``."""
    options, job_flags, words = _parse(list(argv))
    compared_job = _job(options, job_flags, words)
    compared = _sides(options, [*job_flags, *words], compared_job.on_by_default)
    output = job.new_folder(Path(options.output_dir), "compare")
    _say(f"mindspeed_dsa compare: writing to {output}")
    with job.ending_with_us():
        return _compare(options, compared_job, compared, output)


def _compare(options: argparse.Namespace, chosen: Job, compared: Sides, output: Path) -> int:
    timeout = None if options.timeout is None else options.timeout * 60.0
    runs: list[Run] = []
    records: dict[str, list[Record]] = {}
    checkpoint: dict[str, Any] | None = None
    # The example job first writes initial weights, from which every run of both sides starts.
    start = chosen.prepare(output, compared.a)
    if start is not None:
        runs.append(job.execute("A", 0, output / "logs-initial", start, {}, timeout))
        _say(f"initial weights: {runs[-1].problem or f'written in {runs[-1].wall_s:.1f} s'}")
        if not runs[-1].problem:
            before = result.digest_of_files(output / "initial")
            checkpoint = {"folder": str(output / "initial"), "sha256": before, "unchanged": True}
    # A B A B, not A A B B: a slow drift of the machine then affects both sides alike.
    for repeat, side in ((repeat, side) for repeat in range(1, options.repeats + 1) for side in "AB"):
        if runs and runs[-1].problem:
            break
        done = _one(chosen, compared, output, side, repeat, timeout, records)
        runs.append(done)
        times = f"{done.wall_s:.1f} s, {len(records.get(done.name, ()))} steps"
        _say(f"{done.name} of {options.repeats} x 2: {done.problem or times}")
    # A run that writes into the shared checkpoint would give the next one other weights.
    if checkpoint is not None:
        checkpoint["unchanged"] = result.digest_of_files(output / "initial") == checkpoint["sha256"]
    found = result.build(compared, runs, records, options.warmup_steps, checkpoint)
    return _publish(found, runs, records, output)


def _one(
    chosen: Job,
    compared: Sides,
    output: Path,
    side: str,
    repeat: int,
    timeout: float | None,
    records: dict[str, list[Record]],
) -> Run:
    folder = output / f"{side}{repeat}"
    environment = {**job.ours(folder), **chosen.environment(folder)}
    command = chosen.command(output, folder, compared.flags(side))
    done = job.execute(side, repeat, folder, command, environment, timeout)
    if not done.problem:
        file = folder / chosen.metrics
        try:
            records[done.name] = metrics.read(file)
        except (OSError, ValueError) as error:
            done.problem = f"wrote no readable records ({error})"
            if not file.exists():
                done.problem = (
                    f"wrote no {file}; the job must import mindspeed_dsa.megatron_adaptor and train through "
                    "megatron.training, or write its records itself (--metrics-file)"
                )
        else:
            if not records[done.name]:
                done.problem = f"made no step: {file} is empty"
    return done


def _publish(
    found: dict[str, Any], runs: Sequence[Run], records: dict[str, list[Record]], output: Path
) -> int:
    found["plot"] = None
    if found["ok"]:
        picture = output / "compare.png"
        if text.draw(picture, records):
            found["plot"] = str(picture)
        else:
            found["warnings"].append("no plot without matplotlib: pip install 'mindspeed_dsa[viz]'")
    (output / "compare.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(text.table(found) if found["ok"] else text.failure(found))
    print("\n" + "\n".join(filter(None, [str(output / "compare.json"), found["plot"]])))
    for failed in (done for done in runs if done.problem):
        tail = job.last_lines(failed.log) or job.last_lines(failed.log.with_name("stdout.txt"))
        _say("\n".join([f"last lines of {failed.log}:", *(f"  {line}" for line in tail)]))
    return 0 if found["ok"] else 1


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Split into compare's options, flags for the example job, and the command of another job."""
    cut = argv.index("--") if "--" in argv else len(argv)
    own_words, words = argv[:cut], argv[cut + 1 :]
    # argparse treats a value such as --no-x as an option, unless it is joined to its flag.
    for name in ("--features", "--a", "--b"):
        if name in own_words[:-1]:
            at = own_words.index(name)
            own_words[at : at + 2] = [f"{name}={own_words[at + 1]}"]
    parser = _parser()
    options, job_flags = parser.parse_known_args(own_words)
    if cut < len(argv) and not words:
        parser.error("nothing follows --; give the job's command there")
    # A misspelt option of compare would otherwise be passed to the example job, which may ignore it.
    known = [name for action in parser._actions for name in action.option_strings]
    for flag in job_flags:
        close = difflib.get_close_matches(flag.partition("=")[0], known, n=1, cutoff=0.85)
        if flag.startswith("--") and close:
            parser.error(f"{flag}: did you mean {close[0]}? (flags of the job may follow --)")
    if words and job_flags:
        parser.error(
            f"{job_flags[0]} is not a flag of compare; flags of the job belong after --, to its command"
        )
    if (options.features is None) == (options.a is None and options.b is None):
        parser.error("specify what to compare: either --features NAME,... or --a FLAGS --b FLAGS")
    return options, job_flags, words


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_dsa compare",
        usage="%(prog)s (--features NAME,... | --a FLAGS --b FLAGS) [options] [EXAMPLE FLAGS | -- COMMAND]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--features", metavar="NAME,...", help="features that are off in A and on in B")
    add("--a", metavar="FLAGS", help="flags of side A, in one string; unset: none")
    add("--b", metavar="FLAGS", help="flags of side B, in one string; unset: none")
    add(
        "--repeats",
        type=job.positive,
        default=1,
        metavar="N",
        help="runs per side, in the order A B A B (default: 1)",
    )
    add(
        "--nproc", type=job.positive, metavar="N", help="processes per run, for a job that is a Python script"
    )
    add(
        "--warmup-steps",
        type=int,
        default=3,
        metavar="N",
        help="first steps, excluded from the times (default: 3)",
    )
    add(
        "--output-dir",
        default="runs/compare",
        metavar="DIR",
        help="if it exists, a number is appended, as in DIR-2",
    )
    add("--metrics-file", metavar="FILE", help="records that the job itself writes, relative to {out}")
    add("--timeout", type=float, metavar="MINUTES", help="stop a run that takes longer")
    return parser


def _job(options: argparse.Namespace, flags: Sequence[str], words: Sequence[str]) -> Job:
    if words:
        return CommandJob(tuple(words), options.nproc, options.metrics_file)
    if options.metrics_file:
        raise SettingsError("mindspeed_dsa compare: --metrics-file is for your own command after --")
    return ExampleJob(tuple(flags), options.nproc or 1)


def _sides(options: argparse.Namespace, command: Sequence[str], on_by_default: Sequence[str]) -> Sides:
    if options.features is None:
        return sides.of_flags(options.a or "", options.b or "")
    names = [name.strip() for name in options.features.split(",") if name.strip()]
    if not names:
        raise SettingsError("mindspeed_dsa compare: --features names no feature")
    return sides.of_features(names, command, on_by_default=on_by_default)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
