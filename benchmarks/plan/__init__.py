"""Plans compared with counted bytes, their own speed, and figures of published articles."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.plan import published as published_runs
from benchmarks.plan.child import ANSWER
from benchmarks.plan.layouts import LAYOUTS, RANKS, flags_of
from benchmarks.registry import Metrics
from mindspeed_dsa.tools.planner import arguments, communication, devices, memory, plan, search
from mindspeed_dsa.tools.planner.job import Job
from tests.tools.planner.articles import FIGURES

_DEEPSEEK = (
    "pretrain_gpt.py --seq-length 4096 --micro-batch-size 1 --global-batch-size 16384 --bf16 "
    "--pipeline-model-parallel-size 16 --decoder-last-pipeline-num-layers 1 --expert-model-parallel-size 32 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --use-fused-dsa "
    "--dsa-indexer-loss-coeff 0.01 --moe-grouped-gemm"
)
_ROUNDS = 5


def run(device: str, quick: bool = False, only: str | None = None, published: str | None = None) -> Metrics:
    """Return all metrics of the case.

    Args:
        device: not used: plans are arithmetic, and bytes are counted on CPUs.
        quick: two layouts, and no search.
        only: part of the layouts' names.
        published: file of published runs to plan, and nothing else; empty for those of this folder.
    """
    if published is not None:
        return published_runs.run(published, _say)
    names = [name for name in LAYOUTS if only is None or only in name]
    names = names[:2] if quick else names
    if not names:
        raise SystemExit(f"plan: no layout has {only!r} in its name; there are {', '.join(LAYOUTS)}")
    errors = compared(names)
    worst = {
        f"{what}_error": max(each[what] for each in errors.values())
        for what in ("weights", "gradients", "optimizer", "activations", "bytes")
    }
    return {
        **worst,
        **_speed(search_too=not quick),
        "articles_reproduced": sum(figure.reproduced for figure in FIGURES),
        "articles_total": len(FIGURES),
        "layouts": errors,
    }


def compared(names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the largest relative difference between counted and planned of any rank, by layout."""
    counted = _count(names)
    return {name: _errors(name, [each for each in counted if each["layout"] == name]) for name in names}


def _errors(name: str, counted: Sequence[dict[str, Any]]) -> dict[str, float]:
    job = arguments.job_of(["pretrain_dsa.py", *flags_of(name)], RANKS, imbalance=1.0)
    ranks = memory.of_job(job, 0.0)
    transfers = communication.of_job(job)
    worst = dict.fromkeys(("weights", "gradients", "optimizer", "activations", "bytes", "other"), 0.0)
    for answer in counted:
        rank_memory = ranks[answer["pipeline_rank"]]
        pairs = {
            "weights": (answer["weights"], rank_memory.weights + rank_memory.buffers),
            "gradients": (answer["gradients"], rank_memory.gradients),
            "activations": (answer["kept"], rank_memory.kept),
        }
        optimizer = rank_memory.masters + rank_memory.moments
        # State on the host leaves little on the device: compare with the host's bytes added to both sides.
        pairs["optimizer"] = (answer["optimizer"] + rank_memory.host, optimizer + rank_memory.host)
        for what, (here, planned) in pairs.items():
            worst[what] = max(worst[what], abs(here - planned) / planned)
        expected = communication.by_group(transfers[answer["pipeline_rank"]])
        received = dict(answer["received"])
        sums = sum(received.values())
        worst["other"] = max(worst["other"], received.pop("other", 0.0) / max(sums, 1.0))
        for group in {*expected, *received}:
            here, planned = received.get(group, 0.0), expected.get(group, 0.0)
            if max(here, planned) > 0.001 * sums:
                worst["bytes"] = max(worst["bytes"], abs(here - planned) / max(planned, 1.0))
        _say(_line(name, answer, rank_memory, expected))
    return worst


def _line(name: str, each: dict[str, Any], own: memory.RankMemory, expected: dict[str, float]) -> str:
    def pair(here: float, planned: float) -> str:
        return f"{here:.0f}/{planned:.0f}"

    state = {
        "weights": pair(each["weights"], own.weights + own.buffers),
        "gradients": pair(each["gradients"], own.gradients),
        "optimizer": pair(each["optimizer"], own.masters + own.moments),
        "kept": pair(each["kept"], own.kept),
        "peak": pair(each["peak"], own.kept + sum(own.temporary.values())),
    }
    groups = {
        g: pair(each["received"].get(g, 0.0), expected.get(g, 0.0)) for g in {*each["received"], *expected}
    }
    return f"{name}, rank {each['rank']}, counted/planned: {state} {groups}"


def _count(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the answers of all ranks."""
    root = Path(__file__).parents[2]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    shared |= {"WORLD_SIZE": str(RANKS), "PYTHONPATH": os.pathsep.join([str(root), *sys.path[1:]])}
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.plan.child", *names],
            cwd=root,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        printed = [child.communicate()[0] for child in children]
    finally:
        for child in children:
            child.kill()
    if any(child.returncode for child in children):
        raise RuntimeError("plan: a rank failed; its messages are above")
    lines = [line for text in printed for line in text.splitlines() if line.startswith(ANSWER)]
    return [json.loads(line.removeprefix(ANSWER)) for line in lines]


def _speed(search_too: bool) -> dict[str, float]:
    """Return milliseconds to plan DeepSeek-V3.2 on 2048 ranks from its flags, and seconds of a search."""
    h200 = devices.device("h200")

    def job(any_layout: bool = False) -> Job:
        return arguments.job_of(_DEEPSEEK.split(), 2048, "deepseek-v3.2", any_layout=any_layout)

    figures = {"plan_ms": 1e3 * min(_seconds(lambda: plan.make(job(), h200)) for _ in range(_ROUNDS))}
    if search_too:
        figures["search_s"] = _seconds(lambda: search.search(job(any_layout=True), h200))
    return figures


def _seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
