"""``python -m benchmarks CASE [--device DEVICE] [--json FILE] [--quick]``.

Logs go to stderr. The last line on stdout is one JSON object,
``{"case": ..., "metrics": {...}, "device": ..., "versions": {...}, "date": ...}``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.registry import CASES, Case


def main(argv: Sequence[str] | None = None) -> int:
    """Run one case and print its result; return 1 if its metrics have ``failed``."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Runs one benchmark; the last line of its output is one JSON object.",
        epilog="cases: " + "; ".join(f"{case.name}: {case.summary}" for case in CASES.values()),
    )
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "npu"))
    parser.add_argument("--json", metavar="FILE", help="also write the object to a file")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny problems, to check that the case works; figures are meaningless",
    )
    extra = {name: text for case in CASES.values() for name, text in case.options.items()}
    optional = {name for case in CASES.values() for name in case.optional}
    for name, text in extra.items():
        cases = ", ".join(case.name for case in CASES.values() if name in case.options)
        # Without its value, an optional one is "".
        form: dict[str, Any] = {"nargs": "?", "const": ""} if name in optional else {}
        parser.add_argument(f"--{name}", metavar=name.upper(), help=f"{cases}: {text}", **form)
    options = parser.parse_args(argv)
    case_options = {name: getattr(options, name) for name in extra if getattr(options, name) is not None}
    for name in case_options:
        if name not in CASES[options.case].options:
            parser.error(f"{options.case} has no --{name}; omit it")
    if options.quick and not CASES[options.case].has_quick:
        parser.error(f"{options.case} has no quick form; omit --quick")
    # Output of the measured code (Megatron prints to stdout) goes to the log.
    with contextlib.redirect_stdout(sys.stderr):
        outcome = result(CASES[options.case], options.device, options.quick, **case_options)
    text = json.dumps(outcome)
    if options.json:
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if outcome["metrics"].get("failed") else 0


def result(case: Case, device: str, quick: bool = False, **options: str) -> dict[str, Any]:
    """Run a case; return ``{case, metrics, device, versions, date}``.

    Raises:
        SystemExit: required packages or the requested device are missing.
    """
    if why := case.refusal():
        raise SystemExit(why)
    if case.on_device:
        from mindspeed_dsa import platforms
        from mindspeed_dsa.patches.errors import SettingsError

        try:
            device = platforms.detect(device)
        except SettingsError as error:
            raise SystemExit(f"{case.name}: {error}") from error
        name = platforms.describe(device)["device"]
    else:
        device, name = "cpu", f"{platform.machine()}, {os.cpu_count()} cores"
    metrics = case.run(device, quick, **options)
    from mindspeed_dsa.patches import versions

    return {
        "case": case.name,
        "metrics": metrics,
        "device": f"{device} ({name})",
        "versions": versions.installed(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


if __name__ == "__main__":
    sys.exit(main())
