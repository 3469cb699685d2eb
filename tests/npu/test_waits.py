"""A training step makes the host wait for nothing, and leaves nothing to the AI CPU.

Exceptions are listed here, by place and with the most that a step may have.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.npu import waits_jobs
from tests.npu.device import launch
from tests.npu.waits_jobs import MICROBATCHES

DSA = "--use-fused-dsa --use-dsa-absorb on"
DENSE = "--experimental-attention-variant none"
TP = "--tensor-model-parallel-size 2 --sequence-parallel"
EP = "--expert-model-parallel-size 2"
CP = "--context-parallel-size 2"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LOSS = "--fused-linear-cross-entropy --fused-linear-cross-entropy-gradient"
BALANCED = "--balanced-moe-experts --balanced-moe-matmul-rate 0.001 --balanced-moe-link-rate 1000"

PER_RANK = MICROBATCHES // 2  # with two data parallel ranks
SPLITS = "_maybe_dtoh_and_synchronize"
"""Place where Megatron's dispatcher waits for the number of rows to each rank."""
ALLOWED = {
    "dsa_job/": 100,  # the example reads its losses
    "get_grad_norm_fp32": 2,  # norms of experts and of all other parameters
}
"""Most waits of a step, by place."""

Cases = dict[str, tuple[str, dict[str, int]]]
QUICK: dict[int, Cases] = {
    1: {
        "DSA": (f"{DSA} --num-experts 0", {}),
        "grouped experts": (DSA, {}),
        "recomputed": (f"{DSA} {FULL}", {}),
        "packs": (f"{DSA} --pack-documents", {}),
        # The device scales the gradient meanwhile.
        "loss in forward": (f"{DSA} {LOSS} forward", {"linear_cross_entropy/__init__.py": MICROBATCHES}),
    },
    2: {
        "EP2": (f"{DSA} {EP}", {SPLITS: PER_RANK}),
        "pairs": (f"{DSA} {EP} --moe-fb-overlap", {SPLITS: PER_RANK}),
        "transfers behind products": (f"{DSA} {EP} --moe-alltoall-overlap-comm", {SPLITS: PER_RANK}),
        # The host makes the plan from counts of all ranks.
        "balanced experts": (
            f"{DSA} {EP} {BALANCED}",
            {SPLITS: PER_RANK, "balanced_experts/layer.py": PER_RANK},
        ),
    },
}
"""Flags, and exceptions in addition to :data:`ALLOWED`, by number of ranks and name."""
MORE: dict[int, Cases] = {
    1: {
        "parts joined": ("--use-fused-dsa --use-dsa-absorb off --num-experts 0", {}),
        "dense attention": (f"{DENSE} --num-experts 0", {}),
        "recomputed experts": (f"{DSA} --recompute-granularity selective --recompute-modules moe", {}),
        "prediction": (f"{DSA} --mtp-num-layers 1", {}),
        "loss in backward": (f"{DSA} {LOSS} backward", {}),
        # A list of numbers that their two halves do not determine, and a check for NaN.
        "reused weights": (f"{DSA} --reuse-fp32-param --use-distributed-optimizer", {"bf16_split.py": 2}),
    },
    2: {
        "halves": (
            f"{DSA} {EP} --moe-batch-overlap --moe-batch-overlap-always --micro-batch-size 2",
            {SPLITS: PER_RANK},
        ),
        # The device compares the rows' destinations; the host reads the answer while another piece is in
        # transit.
        "recomputed pairs": (
            f"{DSA} {EP} --moe-fb-overlap {FULL}",
            {SPLITS: 2 * PER_RANK, "fb_overlap/recompute.py": PER_RANK},
        ),
        "TP2": (f"{DSA} {TP}", {SPLITS: MICROBATCHES}),
        "CP2": (f"{DSA} {CP}", {}),
        "packs, CP2": (f"{DSA} {CP} --pack-documents", {}),
        "dense attention, CP2": (f"{DENSE} {CP} --context-parallel-algo ulysses_cp_algo", {}),
    },
}
"""Cases of the long tests, likewise."""


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        *(pytest.param(ranks, cases, id=f"{ranks} ranks") for ranks, cases in QUICK.items()),
        *(
            pytest.param(ranks, cases, id=f"{ranks} ranks, more", marks=pytest.mark.full)
            for ranks, cases in MORE.items()
        ),
    ],
)
def test_nothing_waits(ranks: int, cases: Cases) -> None:
    job = json.dumps([[name, flags] for name, (flags, _) in cases.items()])
    done = launch.run(Path(waits_jobs.__file__), [job], ranks=ranks, limit=900)
    for output in done.require_success().output:
        said = [
            json.loads(line.removeprefix(waits_jobs.MARK))
            for line in output.splitlines()
            if line.startswith(waits_jobs.MARK)
        ]
        assert [name for name, _ in said] == list(cases)
        wrong = [f"{name}: {each}" for name, events in said for each in problems(events, cases[name][1])]
        assert not wrong, "\n".join(wrong)


def problems(events: Any, allowed: dict[str, int]) -> list[str]:
    """Return waits and copies of a step that are not allowed, or exceed the allowed number."""
    if isinstance(events, str):
        return [events]
    left = {**ALLOWED, **allowed}
    problems_of_step = []
    for count, kind, operator, place in events:
        allowed_place = next((part for part in left if part in place), None)
        if allowed_place is None or kind in ("fallback", "aicpu"):
            problems_of_step.append(f"{count} {kind} {operator} at {place}")
        elif kind == "wait":  # a copy from pageable memory is a wait, too
            left[allowed_place] -= count
    return [
        *problems_of_step,
        *(f"{-most} waits too many at {part}" for part, most in left.items() if most < 0),
    ]


def test_a_wait_is_a_problem() -> None:
    assert not problems([[1, "wait", "item", "dsa_job/step.py:1 step"], [2, "wait", "copy", "x"]], {"x": 2})
    for events in (
        [[1, "wait", "nonzero", "layer.py:1 forward"]],
        [[3, "wait", "copy", "x"]],
        [[1, "aicpu", "sort", "x"]],
        [[1, "fallback", "sort", "dsa_job/step.py:1 step"]],
        "SettingsError: no",
    ):
        assert len(problems(events, {"x": 2})) == 1, events
