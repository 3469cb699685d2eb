"""Context parallelism on one GPU: two processes as ranks, compared with one process for the whole sequence.

NCCL may refuse two ranks of a group on one device; the report then quotes its message.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from benchmarks import launched
from benchmarks.gpu import job
from benchmarks.gpu.features import MODEL
from benchmarks.gpu.layer import BF16, STEPS, TINY, apart, measure

RANKS = 2
_FUSED = "--use-fused-dsa"
CASES = {
    "rows in halves": "",
    "keys kept": "--cp-keep-gathered",
    "packs": "--pack-documents --micro-batch-size 1",
}
"""Flags in addition to ``--context-parallel-size``; the job with one rank also gets the flags of packs."""
_ON_ONE_DEVICE = ("Duplicate GPU", "ncclInvalidUsage")


def run(
    quick: bool,
    seconds: float,
    tell: Callable[[Any], None],
    model: str | None = None,
    cases: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return by case how far losses are ``apart``, or the reason as ``refused`` or ``absent``.

    Args:
        quick: a tiny model, one case.
        seconds: time limit of all jobs together.
        tell: callback that gets the figures so far.
        model: model's flags; default: a GPU-sized model, or a tiny one if ``quick``.
        cases: flags by case; default: :data:`CASES`.
    """
    deadline = time.monotonic() + 0.9 * seconds
    if model is None:
        model = f"{TINY} --bf16" if quick else MODEL
    alone = cache(measure)
    figures: dict[str, Any] = {}
    for name, flags in (CASES if cases is None else cases).items():
        whole = alone(" ".join(f"{model} {_FUSED} {flags.replace('--cp-keep-gathered', '')}".split()))
        cut = _of_ranks(
            f"{model} {_FUSED} {flags} --context-parallel-size {RANKS}", deadline - time.monotonic()
        )
        figures[name] = _compared(whole, cut)
        tell(figures)
        if "absent" in figures[name]:
            break
    return figures


def _compared(whole: dict[str, Any] | str, cut: dict[str, Any] | str) -> dict[str, Any]:
    for what, figures in (("one rank", whole), (f"{RANKS} ranks", cut)):
        if isinstance(figures, str):
            kind = "absent" if any(words in figures for words in _ON_ONE_DEVICE) else "refused"
            return {kind: f"{what}: {figures}"}
    assert isinstance(whole, dict)
    assert isinstance(cut, dict)
    seen = [name for name in BF16 if all(each is not None for each in (*whole[name], *cut[name]))]
    distance = {name: apart(cut[name], whole[name]) for name in seen}
    found = {"apart": distance, "step_ratio": cut["step_ms"] / whole["step_ms"]}
    wrong = [name for name in seen if not distance[name] <= BF16[name]]
    return {**found, "refused": f"{wrong[0]} is {distance[wrong[0]]:.1e} apart"} if wrong else found


def _of_ranks(flags: str, seconds: float) -> dict[str, Any] | str:
    """Return the first rank's figures, or the last line of a rank that failed."""
    device = {"LOCAL_RANK": "0"}
    return launched.figures(__name__, flags.split(), RANKS, seconds, lambda rank: device, _ON_ONE_DEVICE)


if __name__ == "__main__":
    print(json.dumps(job.train(sys.argv[1:], STEPS)), flush=True)
