"""``plan``: memory, communication and work of a layout, before anyone books a cluster."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.tools.planner import arguments, configs, plan, report, search, timing
from mindspeed_dsa.tools.planner.job import Job

_DESCRIPTION = """\
Plans a job from the very flags that will train it; builds nothing and needs neither torch nor Megatron.

  python -m mindspeed_dsa plan --devices 512 --device h200 --config deepseek-v3.2 -- pretrain_gpt.py FLAGS
  python -m mindspeed_dsa plan --what-if=--swap-optimizer -- examples/pretrain_dsa.py FLAGS

Exit status: 0 it fits; 1 it does not; 2 the flags are refused."""
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"mindspeed_dsa plan: {message}; flags of the job follow --")


def run(argv: Sequence[str]) -> int:
    """Plan, print, and write what was asked for."""
    own, words = list(argv), []
    if "--" in own:
        cut = own.index("--")
        own, words = own[:cut], own[cut + 1 :]
    options, more = _parser().parse_known_args(own)
    if more and "--" in argv:
        raise SettingsError(f"mindspeed_dsa plan: there is no option {more[0]}; flags of the job follow --")
    for name, least in (("allocator", 0.0), ("tokens_per_second", 0.0), ("best", 1)):
        value = getattr(options, name)
        if value is not None and not least <= value < math.inf:
            flag = name.replace("_", "-")
            raise SettingsError(f"mindspeed_dsa plan: --{flag} {value:g}: give {least:g} or more")
    words = [*words, *more]
    given = {name: getattr(options, f"device_{name}") for name in _RATES}
    device = timing.device(options.device, **given)

    def job_with(others: Sequence[str] = (), any_layout: bool = False) -> Job:
        flags = [*words, *others]
        return arguments.job_of(flags, options.devices, options.config, options.imbalance, any_layout)

    def planned(others: Sequence[str] = ()) -> plan.Plan:
        return plan.make(job_with(others), device, options.allocator)

    if options.search:
        found = search.search(job_with(any_layout=True), device, options.best, options.allocator)
        print(search.text(found))
        best = found[0].plan
        record = {"found": [{**each.plan.record(), "measures": each.measures} for each in found]}
    else:
        best = planned()
        changes = search.differences(options.what_if, best, planned)
        print(report.text(best, options.tokens_per_second))
        print("".join(f"\n{each.text()}\n" for each in changes), end="")
        record = {**best.record(), "what_if": [vars(each) for each in changes]}
    try:
        if options.png and not report.draw(Path(options.png), best):
            raise SettingsError(
                "mindspeed_dsa plan: --png needs matplotlib: pip install 'mindspeed_dsa[viz]'"
            )
        if options.json:
            Path(options.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"mindspeed_dsa plan: --png or --json cannot be written ({error})") from error
    return 0 if best.fits else 1


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m mindspeed_dsa plan",
        usage="%(prog)s [options] -- [pretrain_gpt.py | pretrain_dsa.py] FLAGS",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--devices", type=int, metavar="N", help="of the job; default: what one replica needs")
    add("--device", default="h100", metavar="NAME", help=f"of {', '.join(timing.DEVICES)}; default: h100")
    for name, help in _RATES.items():
        kind = int if name == "node" else float
        add(f"--device-{name}", type=kind, metavar="X", help=f"{help}; default: the device's")
    add("--config", metavar="FILE", help=f"config.json with the model's sizes, or {', '.join(configs.KNOWN)}")
    add("--imbalance", type=float, default=1.0, metavar="X", help="fullest rank's tokens over the mean")
    add(
        "--allocator", type=float, default=plan.ALLOCATOR, metavar="SHARE", help="that it adds; default: 0.05"
    )
    add("--tokens-per-second", type=float, metavar="X", help="of the job: prints its utilisation")
    add(
        "--what-if",
        action="append",
        default=[],
        metavar="FLAG",
        help="what one more flag changes; repeatable",
    )
    add("--search", action="store_true", help="best layouts of --devices, whatever the flags' own layout")
    add("--best", type=int, default=5, metavar="N", help="layouts that --search prints; default: 5")
    add("--png", metavar="FILE", help="picture of memory and time (needs matplotlib)")
    add("--json", metavar="FILE", help="everything, for other programs")
    return parser
