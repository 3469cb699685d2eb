"""Plays a draw: the job without features, with them, and resumed from its middle in another layout.

The resumed job is compared with the uninterrupted one. With dropout this holds in one layout only: each rank
draws masks from its own generator state, and Megatron loads no states into a layout of other ranks. There, a
job without features is resumed in the other layout as well, from its own middle, and is the reference. In
fp32, from PP2 x EP2 to CP2, it differs from the uninterrupted job by 1.67 of the tolerance, and from the
resumed job with features by a thousandth.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.combinations.draw import LAYOUTS, Draw
from tests.support import warm
from tests.support.ports import free_port

SCRIPT = str(Path(__file__).parents[2] / "examples" / "pretrain_dsa.py")
TOLERANCE = {"lm_loss": 1e-3, "grad_norm": 2e-2, "indexer_loss": 5e-2}
"""Largest relative difference in fp32; bf16 allows four times as much. The bounds are above the effect of one
other choice of a key or an expert in so small a model. They are below the effect of a lost microbatch (an
eighth) or of a wrong scale.
"""
SECONDS = 280.0


@dataclass(frozen=True)
class Outcome:
    """Outcome of a draw.

    Attributes:
        verdict: ``same``, ``refused``, ``different``, ``traceback``, ``hang``, or ``no job`` if layout and
            model do not fit even without features.
        stage: ``plain``, ``features`` or ``resumed``.
        detail: message of a refusal, last lines of an error, or largest difference.
    """

    verdict: str
    stage: str
    detail: str


class Ended(Exception):
    """A job that did not train."""

    def __init__(self, verdict: str, detail: str) -> None:
        super().__init__(detail)
        self.verdict, self.detail = verdict, detail


def play(draw: Draw, folder: Path) -> Outcome:
    """Run the three jobs of a draw below ``folder``, which is removed on success."""
    folder.mkdir(parents=True, exist_ok=True)
    stage = "plain"
    try:
        train(draw.start(), 1, folder / "start", ["--save", str(folder / "start" / "checkpoints")])
        start = ["--load", str(folder / "start" / "checkpoints"), "--finetune"]
        argv = draw.argv(draw.layout, features=False)
        ranks = LAYOUTS[draw.layout][0]
        plain = train(argv, ranks, folder / "plain", start if draw.other_masks else [*start, "--no-save"])
        stage = "features"
        run = folder / "features"
        featured = train(draw.argv(draw.layout, features=True), ranks, run, start)
        first = deviation(plain, featured, draw.dtype)
        if first > 1:
            return Outcome("different", stage, f"{first:.3g} of what is allowed")
        stage = "resumed"
        expected = [record for record in featured if record["step"] > 2]
        if draw.other_masks:
            expected = _resume(draw, folder / "plain", folder / "plain-resumed", features=False)
        resumed = _resume(draw, run, folder / "resumed", features=True)
        second = deviation(expected, resumed, draw.dtype)
        if second > 1:
            return Outcome("different", stage, f"{second:.3g} of what is allowed")
    except Ended as ended:
        verdict = "no job" if stage == "plain" and ended.verdict == "refused" else ended.verdict
        return Outcome(verdict, stage, ended.detail)
    shutil.rmtree(folder)
    return Outcome("same", stage, f"{max(first, second):.2g} of what is allowed")


def _resume(draw: Draw, run: Path, output: Path, features: bool) -> list[dict[str, Any]]:
    """Resume a run from its second step in the other layout; return the records of its steps."""
    load = ["--load", str(run / "checkpoints"), "--ckpt-step", "2", "--no-save"]
    return train(draw.argv(draw.resumed, features=features), LAYOUTS[draw.resumed][0], output, load)


def train(argv: Sequence[str], ranks: int, output: Path, more: Sequence[str]) -> list[dict[str, Any]]:
    """Run one job on ``ranks`` ranks and return the records of its steps.

    Raises:
        Ended: the job was refused, failed, or did not end in time.
    """
    cache = str(output.parent / "data-cache")
    command = [sys.executable, SCRIPT, *argv, "--output-dir", str(output), "--data-cache-path", cache, *more]
    port = str(free_port())
    with ExitStack() as files:
        outputs = [
            files.enter_context(open(f"{output}-{rank}.txt", "w+", encoding="utf-8")) for rank in range(ranks)
        ]
        started = []
        for rank, text in enumerate(outputs):
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            if ranks > 1:
                environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
                environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            started.append(warm.popen(command, stdout=text, stderr=subprocess.STDOUT, env=environ))
        codes = []
        for process in started:
            try:
                codes.append(process.wait(SECONDS))
            except subprocess.TimeoutExpired:
                for other in started:
                    other.kill()
                raise Ended("hang", f"no end after {SECONDS:.0f} s") from None
        texts = []
        for text in outputs:
            text.seek(0)
            texts.append(text.read())
    if any(codes):
        raise judged(codes, texts)
    metrics = output / "metrics.jsonl"
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


def judged(codes: Sequence[int], texts: Sequence[str]) -> Ended:
    """Tell a refusal from an error: all ranks exit with code 2, and only rank 0 explains."""
    refused = all(code == 2 for code in codes) and not any("Traceback" in text for text in texts)
    if refused:
        _, found, said = texts[0].partition("pretrain_dsa.py:")
        if found and not any("pretrain_dsa.py:" in text for text in texts[1:]):
            return Ended("refused", " / ".join(line.strip() for line in said.splitlines()))
    worst = max(texts, key=lambda text: "Traceback" in text)
    return Ended("traceback", f"exit codes {list(codes)}: " + " | ".join(worst.splitlines()[-4:]))


def deviation(expected: Sequence[dict[str, Any]], actual: Sequence[dict[str, Any]], dtype: str) -> float:
    """Return the largest difference of losses and gradient norms, relative to the tolerance."""
    if [record["step"] for record in expected] != [record["step"] for record in actual] or not expected:
        return math.inf
    worst = 0.0
    for before, after in zip(expected, actual, strict=True):
        for name, allowed in TOLERANCE.items():
            left, right = before[name], after[name]
            if (left is None) != (right is None):
                return math.inf
            if left is not None:
                difference = abs(left - right) / max(abs(left), abs(right), 1e-12)
                share = difference / (allowed * (4 if dtype == "bf16" else 1))
                worst = max(worst, share if math.isfinite(share) else math.inf)
    return worst
