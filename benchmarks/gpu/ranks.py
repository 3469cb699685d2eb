"""Context parallelism on one GPU: two processes, each a rank, beside one process with the whole sequence.

NCCL may refuse two ranks of a group on one device; then its words are what is reported.
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
"""Flags beside ``--context-parallel-size``; those of packs belong to the job with one rank, too."""
_ON_ONE_DEVICE = ("Duplicate GPU", "ncclInvalidUsage")


def run(
    quick: bool,
    seconds: float,
    tell: Callable[[Any], None],
    model: str | None = None,
    cases: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """By case: how far losses are ``apart``, ``refused`` with what is wrong, or ``absent`` with why.

    Args:
        quick: a tiny model, one case.
        seconds: time that all together may take.
        tell: called with what is found so far.
        model: flags of the model, instead of a GPU's.
        cases: instead of all.
    """
    deadline = time.monotonic() + 0.9 * seconds
    if model is None:
        model = f"{TINY} --bf16" if quick else MODEL
    alone = cache(measure)
    found: dict[str, Any] = {}
    for name, flags in (CASES if cases is None else cases).items():
        whole = alone(" ".join(f"{model} {_FUSED} {flags.replace('--cp-keep-gathered', '')}".split()))
        cut = _of_ranks(
            f"{model} {_FUSED} {flags} --context-parallel-size {RANKS}", deadline - time.monotonic()
        )
        found[name] = _compared(whole, cut)
        tell(found)
        if "absent" in found[name]:
            break
    return found


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
    """Figures of the first rank, or the last line that a rank has to say."""
    device = {"LOCAL_RANK": "0"}
    return launched.figures(__name__, flags.split(), RANKS, seconds, lambda rank: device, _ON_ONE_DEVICE)


if __name__ == "__main__":
    print(json.dumps(job.train(sys.argv[1:], STEPS)), flush=True)
