"""``host-profile``: what the host does in one step of a job, by class of module."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from mindspeed_dsa.features import built_in
from mindspeed_dsa.features.diagnostics.steps.feature import STEP
from mindspeed_dsa.patches.versions import MEGATRON_DISTRIBUTION
from mindspeed_dsa.runs.metrics import pyplot_for_files
from mindspeed_dsa.session.start_report import aligned
from mindspeed_dsa.tools.compare.job import last_lines, stop

_DESCRIPTION = """\
Runs a training command until one step is recorded, ends it, and prints by class of module what the host did
for a layer: microseconds, operators that were launched, synchronisations with the device.

  python -m mindspeed_dsa host-profile -- python examples/pretrain_dsa.py --train-iters 10
  python -m mindspeed_dsa host-profile --json host.json --png host.png -- torchrun ... pretrain_gpt.py FLAGS

The command must import mindspeed_dsa.megatron_adaptor. Times include those of the profiler. Exit status: 0; 1
if the command ended before the step was recorded; 2 where something is refused."""

REMEDIES = {
    "RMSNorm": ("fused-rmsnorm", "--use-fused-rmsnorm"),
    "MLASelfAttention": ("compile-regions", "--compile-regions"),
    "TopKRouter": ("compile-regions", "--compile-regions"),
    "SharedExpertMLP": ("compile-regions", "--compile-regions"),
    "SequentialMLP": ("moe-grouped-gemm", "--moe-grouped-gemm"),
    "MoELayer": ("moe-permute-fusion", "--moe-permute-fusion"),
    "DSAttention": ("fused-dsa", "--use-fused-dsa"),
    "VocabParallelEmbedding": ("mask-arithmetic", "--fused-operators mask-arithmetic"),
}
"""By a part of a class's name: the feature that takes operators away from it, and its flag."""
_SHOWN = 12
_POLL_S = 0.2


def run(argv: Sequence[str]) -> int:
    """Run the command, print the table, write what was asked for."""
    options = _parse(list(argv))
    with tempfile.TemporaryDirectory(prefix="mindspeed-dsa-host-profile-") as folder:
        found = _recorded(options, Path(folder))
    if found is None:
        return 1
    print("\n".join(table(found)))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.png and not draw(found, Path(options.png)):
        print("no picture: matplotlib is not installed; pip install matplotlib")
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_dsa host-profile",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--step", type=int, default=STEP, help="which step is recorded; default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write the record to FILE")
    parser.add_argument("--png", metavar="FILE", help="draw it")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="the job, after --")
    if "--" not in argv and not {"-h", "--help"} & set(argv):
        parser.error("name the job's command after --")
    at = argv.index("--") if "--" in argv else len(argv)
    options = parser.parse_args([*argv[:at], *(["command"] if at < len(argv) - 1 else [])])
    options.command = argv[at + 1 :]
    return options


def _recorded(options: argparse.Namespace, folder: Path) -> dict[str, Any] | None:
    file = folder / "profile.json"
    env = {
        **os.environ,
        "MINDSPEED_DSA_HOST_PROFILE": str(file),
        "MINDSPEED_DSA_HOST_PROFILE_STEP": str(options.step),
        "TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE": "1",  # without it compiled kernels on CPUs are not seen
    }
    log = folder / "log.txt"
    with open(log, "wb") as out:
        try:
            process = subprocess.Popen(
                options.command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )
        except OSError as error:
            print(f"{options.command[0]} cannot be started: {error}")
            return None
        try:
            while process.poll() is None and not file.exists():
                time.sleep(_POLL_S)
        finally:
            stop(process)
    if not file.exists():
        print("\n".join(last_lines(log)))
        print(
            f"the command ended with status {process.returncode} before step {options.step} and the one "
            "after it were recorded; it must import mindspeed_dsa.megatron_adaptor and make that many steps"
        )
        return None
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def table(found: dict[str, Any]) -> list[str]:
    """A record as lines of text, the class that costs most first."""
    layers = max(1, found["layers"])
    rows = [("class", "calls", "host [us]", "launches", "waits", "what takes it away")]
    for name, row in _ordered(found)[:_SHOWN]:
        rows.append(
            (
                name,
                f"{row['calls'] / layers:.4g}",
                f"{(row['forward_us'] + row['backward_us']) / layers:.0f}",
                f"{row['launches'] / layers:.4g}",
                f"{row['waits'] / layers:.4g}",
                remedy(name, found["features_on"], found["megatron_core"]),
            )
        )
    inside = [row for row in found["classes"].values() if row["in_layers"]]
    summed = {key: sum(row[key] for row in inside) / layers for key in ("launches", "waits")}
    time_us = sum(row["forward_us"] + row["backward_us"] for row in inside) / layers
    library = found["library"]
    most = ", ".join(f"{each['function']} {each['microseconds']:.0f} us" for each in library["functions"][:3])
    return [
        f"step {found['step']}, {found['layers']} passes of layers; for one pass, forward and backward:",
        *aligned(rows),
        f"a layer in all: {time_us:.0f} us, {summed['launches']:.0f} launches, {summed['waits']:.3g} waits",
        f"patches of mindspeed_dsa: {library['patches']:.2%} of all functions' time",
        f"all lines of it, with those that do Megatron's work: {library['share']:.2%}"
        + (f" ({most})" if most else ""),
    ]


def _ordered(found: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return sorted(found["classes"].items(), key=lambda each: -each[1]["forward_us"] - each[1]["backward_us"])


def remedy(name: str, features_on: Sequence[str], release: str | None = None) -> str:
    """The flag that takes operators away from a class; empty if there is none, it is on, or refused.

    Args:
        name: of the class.
        features_on: by name.
        release: of Megatron-core that the job runs on; None if it is not known.
    """
    needed = {each.name: each.requires.versions.get(MEGATRON_DISTRIBUTION, "") for each in built_in()}
    for part, (feature, flag) in REMEDIES.items():
        served = release is None or SpecifierSet(needed[feature], prereleases=True).contains(release)
        if part in name and feature not in features_on and served:
            return flag
    return ""


def draw(found: dict[str, Any], path: Path) -> bool:
    """Bars of host time by class; false where matplotlib is not installed."""
    try:
        pyplot = pyplot_for_files()
    except ModuleNotFoundError:
        return False
    layers, rows = max(1, found["layers"]), _ordered(found)[:_SHOWN][::-1]
    figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    names = [name for name, _ in rows]
    forward = [row["forward_us"] / layers for _, row in rows]
    axes.barh(names, forward, label="forward")
    axes.barh(names, [row["backward_us"] / layers for _, row in rows], left=forward, label="backward")
    for place, (_, row) in enumerate(rows):
        total = (row["forward_us"] + row["backward_us"]) / layers
        axes.text(total, place, f" {row['launches'] / layers:.4g} launches", va="center", fontsize=7)
    axes.set(xlabel="host microseconds of a layer pass", title="Host time by class of module")
    axes.legend()
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)
    return True
