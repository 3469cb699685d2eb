"""A job that trains nothing: it writes a real job's files, according to its flags. Starts without torch."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--step-time", type=float, default=0.1)
parser.add_argument("--drift-from", type=int, help="step from which the loss departs")
parser.add_argument("--nan-from", type=int)
parser.add_argument("--weights", default="w")
parser.add_argument("--order", help="file that gets this run's name appended")
parser.add_argument("--noise", action="store_true", help="each run a little slower, and off by a bit more")
parser.add_argument("--fail-with")
parser.add_argument("--sleep", type=float, default=0.0)
parser.add_argument("--no-records", action="store_true")
parser.add_argument("--own-metrics", help="write records here instead")
parser.add_argument("--features-on", default="")
args = parser.parse_args()

folder = Path(os.environ["MINDSPEED_DSA_INITIAL_WEIGHTS_DIR"])
run = folder.parent
if args.order:
    with open(args.order, "a") as file:
        file.write(run.name + "\n")
if args.sleep:
    (run / "pid").write_text(str(os.getpid()))
    time.sleep(args.sleep)
if args.fail_with:
    print("\n".join(f"line {number}" for number in range(100)), file=sys.stderr)
    sys.exit(args.fail_with)
folder.mkdir(parents=True)
parameter = {"sha256": args.weights, "dtype": "float32", "shape": [2]}
weights = {"rank": 0, "world_size": 1, "parameters": {"layer.weight": parameter}}
(folder / "weights-rank00000.json").write_text(json.dumps(weights))
report = {"platform": "cpu", "features": [{"name": name} for name in args.features_on.split(",") if name]}
Path(os.environ["MINDSPEED_DSA_MINDSPEED_REPORT_DIR"], "mindspeed_dsa.json").write_text(json.dumps(report))
nth = int(run.name[1:]) if args.noise else 0
if not args.no_records:
    with open(args.own_metrics or os.environ["MINDSPEED_DSA_STEP_METRICS_FILE"], "a") as file:
        for step in range(1, args.steps + 1):
            loss = 5.0 - 0.1 * step + (1e-6 * nth if step > 2 else 0.0)
            if args.drift_from is not None and step >= args.drift_from:
                loss += 0.01 * (step - args.drift_from + 1)
            if args.nan_from is not None and step >= args.nan_from:
                loss = float("nan")
            seconds = (50.0 if step <= 2 else args.step_time) * (1 + 0.5 * nth)  # slow first steps: warm-up
            record = {
                "step": step,
                "lm_loss": loss,
                "indexer_loss": None,
                "grad_norm": 2.0,
                "tokens_per_s": 100.0 / seconds,
                "step_time_s": seconds,
                "peak_memory_bytes": 2**20 * step,
            }
            file.write(json.dumps(record) + "\n")
