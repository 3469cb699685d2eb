"""``plan``: estimate memory, communication and step time of a job from its flags."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from mindspeed_dsa import settings
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.tools.planner import (
    arguments,
    calibration,
    command_lines,
    configs,
    devices,
    differences,
    flags,
    measured,
    picture,
    plan,
    relayout,
    report,
    search,
    torchtitan,
    torchtitan_settings,
)
from mindspeed_dsa.tools.planner.job import Job

_DESCRIPTION = """\
Plans a job from the very flags that will train it; builds nothing and needs neither torch nor Megatron.

  python -m mindspeed_dsa plan --devices 512 --device h200 --config deepseek-v3.2 -- pretrain_gpt.py FLAGS
  python -m mindspeed_dsa plan --what-if=--swap-optimizer -- examples/pretrain_dsa.py FLAGS
  python -m mindspeed_dsa plan --devices 128 --device a3 -- torchtitan_job.toml --training.seq_len 8192

Exit status: 0 it fits, or is tight; 1 it does not fit; 2 the flags are refused, misspelt ones included."""
_RATES = {
    "memory": "GiB of a device",
    "tflops": "of bf16 matrix products",
    "link": "GB/s between devices of a node",
    "network": "GB/s between nodes, per device",
    "host": "GB/s between device and host",
    "node": "devices of a node",
    "matmul": "share of the TFLOP/s that large products reach",
    "attention": "likewise of attention",
    "sparse": "likewise of sparse attention and indexer",
}


_RELEASE = "0.16.1"
"""Megatron-LM release for a search's flags if Megatron-core is not installed."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"mindspeed_dsa plan: {message}; flags of the job follow --")


def run(argv: Sequence[str]) -> int:
    """Plan the job or search for layouts, print the report, and write PNG and JSON if requested."""
    own_words, words = list(argv), []
    if "--" in own_words:
        cut = own_words.index("--")
        own_words, words = own_words[:cut], own_words[cut + 1 :]
    parser = _parser()
    after, words = _own_options(parser, words)
    options, more = parser.parse_known_args([*own_words, *after])
    if more and "--" in argv:
        raise SettingsError(f"mindspeed_dsa plan: there is no option {more[0]}; flags of the job follow --")
    # `not a <= value < inf` also refuses NaN.
    for name, least in (("allocator", 0.0), ("tokens_per_second", 0.0), ("best", 1), ("reserve", 0.0)):
        value = getattr(options, name)
        if value is not None and not least <= value < math.inf:
            flag = name.replace("_", "-")
            raise SettingsError(f"mindspeed_dsa plan: --{flag} {value:g}: give {least:g} or more")
    words = [*words, *more]
    records = measured.read(Path(options.measured)) if options.measured else []
    if not words and records and records[0].flags is not None:
        words, options.devices, options.config = [*records[0].flags], records[0].devices, records[0].config
    of_torchtitan = torchtitan_settings.is_file(words)
    if of_torchtitan and (options.search or options.expert_load):
        raise SettingsError(
            f"mindspeed_dsa plan: --search and --expert-load read flags of Megatron, not {words[0]}"
        )
    if not of_torchtitan:
        _check_spelling(words, parser)
    given = {name: getattr(options, f"device_{name}") for name in _RATES}
    device = devices.device(options.device, reserve=options.reserve, **given)

    def job_with(others: Sequence[str] = (), any_layout: bool = False) -> Job:
        sizes = (options.devices, options.config, options.imbalance)
        if of_torchtitan:
            return torchtitan.job_of([*words, *others], *sizes)
        return arguments.job_of([*words, *others], *sizes, any_layout, options.expert_load)

    def job_of_record(record: measured.Record) -> Job:
        if record.flags is None:
            return measured.same_job(record, job_with(), options.devices)
        _check_spelling(record.flags, parser)
        return arguments.job_of(record.flags, record.devices, record.config, options.imbalance)

    fitted = calibration.calibrated(records, job_of_record, device, options.allocator) if records else None
    if fitted:
        device = fitted.device
        print(f"{calibration.text(fitted)}\n")

    def planned(others: Sequence[str] = (), quick: bool = False) -> plan.Plan:
        return plan.make(job_with(others), device, options.allocator, quick)

    if options.search and options.expert_load:
        dealt = relayout.deal(job_with(), device, _release(), options.allocator)
        print(relayout.text(dealt, words))
        if options.config:
            print(_model(options.config, words, dealt.after.job))
        best = dealt.after
        record: dict[str, Any] = relayout.record(dealt, words)
    elif options.search:
        layouts = search.search(job_with(any_layout=True), device, options.best, options.allocator)
        print(search.text(layouts, words))
        if options.config:
            print(_model(options.config, words, layouts[0].plan.job))
        best = layouts[0].plan
        record = {"found": [_record(item, words) for item in layouts]}
    else:
        best = planned()
        split = shlex.split if of_torchtitan else differences.words_of
        changes = [differences.difference(each, best, planned(split(each))) for each in options.what_if]
        print(report.text(best, options.tokens_per_second))
        if not best.fits and not of_torchtitan:
            # Dozens of variants are planned here; quick plans do not simulate the schedule event by event.
            quick = planned(quick=True)
            ways = differences.ways(quick, lambda others: planned(others, quick=True))
            print(f"\n{differences.text_of_ways(ways, best.job.layout.devices)}")
        print("".join(f"\n{item.text()}\n" for item in changes), end="")
        record = {**best.record(), "what_if": [vars(item) for item in changes]}
    if fitted:
        record["measured"] = fitted.as_dict()
    try:
        if options.png and not picture.draw(Path(options.png), best):
            raise SettingsError(
                "mindspeed_dsa plan: --png needs matplotlib: pip install 'mindspeed_dsa[viz]'"
            )
        if options.json:
            Path(options.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"mindspeed_dsa plan: --png or --json cannot be written ({error})") from error
    return 1 if best.verdict == plan.TOO_LARGE else 0


def _check_spelling(words: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Raise an error for removed and misspelt flags of a job."""
    removed = settings.way_out(word.partition("=")[0] for word in words if word.startswith("--"))
    if wrong := [*removed, *flags.misspelt(words, [*parser._option_string_actions])]:
        raise SettingsError(f"mindspeed_dsa plan: {'; '.join(wrong)}")


def _own_options(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split command line words into the options of ``plan`` and the job's flags."""
    options: list[str] = []
    rest: list[str] = []
    for group in command_lines.groups(words):
        action = parser._option_string_actions.get(group[0].partition("=")[0])
        if action is None:
            rest += group
        else:
            count = 1 if "=" in group[0] or action.nargs == 0 else 2
            options += group[:count]
            rest += group[count:]
    return options, rest


def _record(found: search.Found, words: Sequence[str]) -> dict[str, Any]:
    flags = shlex.join(command_lines.words_for(words, found.plan.job))
    return {**found.plan.record(), "measures": found.measures, "flags": flags}


def _model(name: str, words: Sequence[str], job: Job) -> str:
    """Return text with the Megatron flags for the model's sizes in ``--config``, to add to layout flags."""
    _, flags_given, _ = flags.read(words)
    release = _release()
    found = configs.flags_of(Path(name), flags_given, job, release)
    lines = command_lines.shown([word for line in found for word in shlex.split(line)])
    return "\n".join([f"in training add the flags of {name}, for Megatron-LM {release}:", *lines])


def _release() -> str:
    return str(versions.of_megatron(settings.MEGATRON_ROOT.default) or _RELEASE)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m mindspeed_dsa plan",
        usage="%(prog)s [options] -- [pretrain_gpt.py | pretrain_dsa.py | JOB.toml] FLAGS",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--devices", type=int, metavar="N", help="of the job; default: what one replica needs")
    add("--device", default="h100", metavar="NAME", help=f"of {', '.join(devices.DEVICES)}; default: h100")
    for name, help in _RATES.items():
        kind = int if name == "node" else float
        add(f"--device-{name}", type=kind, metavar="X", help=f"{help}; default: the device's")
    add("--config", metavar="FILE", help=f"config.json with the model's sizes, or {', '.join(configs.KNOWN)}")
    add("--imbalance", type=float, metavar="X", help="fullest rank's tokens over the mean; default: usual")
    add("--expert-load", type=Path, metavar="DIR", help="imbalance by layer from --moe-router-load-report")
    add(
        "--allocator", type=float, default=plan.ALLOCATOR, metavar="SHARE", help="that it adds; default: 0.05"
    )
    add("--reserve", type=float, metavar="GIB", help="for context and collectives; default: 3, of cpu 0")
    add("--tokens-per-second", type=float, metavar="X", help="of the job: prints its utilisation")
    add(
        "--what-if",
        action="append",
        default=[],
        metavar="FLAG",
        help="what one more flag changes; repeatable",
    )
    add(
        "--search",
        action="store_true",
        help="best layouts of --devices; with --expert-load, layers dealt anew",
    )
    add("--best", type=int, default=5, metavar="N", help="layouts that --search prints; default: 5")
    add("--measured", metavar="FILE", help="metrics.jsonl or JSON of a run, which calibrates the device")
    add("--png", metavar="FILE", help="picture of memory and time (needs matplotlib)")
    add("--json", metavar="FILE", help="everything, for other programs")
    return parser
