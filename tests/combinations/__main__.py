"""``python -m tests.combinations [--draws 50] [--seed 0] [--json FILE]``: outcomes of random jobs."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tests.combinations.draw import draws
from tests.combinations.play import play


def main() -> int:
    """Play draws until enough had a job to train; return 1 if any differed, hung or raised."""
    parser = argparse.ArgumentParser(prog="python -m tests.combinations", description=__doc__)
    parser.add_argument("--draws", type=int, default=50, help="combinations whose plain job trains")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="draws of the list that are passed over")
    parser.add_argument("--json", type=Path, help="file for every draw with its outcome")
    args = parser.parse_args()
    counts: Counter[str] = Counter()
    played = []
    scratch = Path(tempfile.mkdtemp(prefix="combinations-"))
    for number, draw in enumerate(draws(args.seed, args.skip + 3 * args.draws)):
        if number < args.skip:
            continue
        if sum(counts.values()) - counts["no job"] >= args.draws:
            break
        outcome = play(draw, scratch / str(number))
        counts[outcome.verdict] += 1
        played.append({**asdict(draw), **asdict(outcome), "number": number})
        if outcome.verdict != "no job":
            print(f"{number:3} {outcome.verdict} ({outcome.stage}) {draw}\n    {outcome.detail}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(played, indent=1) + "\n")
    print(json.dumps({"seed": args.seed, **counts, "kept": str(scratch)}))
    return int(any(counts[verdict] for verdict in ("different", "traceback", "hang")))


if __name__ == "__main__":
    raise SystemExit(main())
