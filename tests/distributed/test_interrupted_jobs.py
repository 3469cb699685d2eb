"""A job that follows failed jobs in the same process is bit-identical to a job in a fresh process.

This holds after Megatron-LM's in-process restart and after a second ``enable``: no handle, buffer, stream,
storage view or measurement that a feature keeps per process belongs to an earlier job.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable

import pytest

from tests.distributed.interrupted_job import Job
from tests.distributed.layouts import ROWS
from tests.distributed.parity import MODEL, TRAINING, Layout
from tests.support.pool import WorkerPool

STEPS = 3
CLASSES = {
    "chunks": "ascend-coc: TP2+SP, 4 chunks, beside stock",
    "context parallel": "dsa-context-parallel: CP2, keys kept",
    "ring": "dense-context-parallel: ring of 2",
    "heads and ring": "dense-context-parallel: heads over 2, ring of 2",
    "halves": "moe-batch-overlap: attention, EP2, memory features",
    "overlap": "moe-alltoall-overlap-comm: PP2 x VPP2 x EP2",
    "experts together": "moe: EP2 x DP2, distributed optimizer, overlap",
    "FSDP2": "fsdp2: PP2 x EP2",
    "sharded experts": "fsdp2: sharded experts, EP2 x EDP2, grouped, memory",
    "FSDP2 pairs": "fsdp2: PP2 x VPP2 x EP2, pairs, memory",
    "logits": "fused-linear-cross-entropy: PP2 x VPP2 x EP2, pairs",
    "reuse": "reuse-fp32-param: PP4 x VPP2, all others",
    "swap": "swap-optimizer: PP2 x DP2, overlap, all others",
    "packs": "pack-documents: CP2 x PP2",
    "host time": "compile-regions: one process, all that saves host time",
}
BY_NAME = {row.layout.name: row.layout for row in ROWS}

Run = Callable[..., list[Job]]


@pytest.fixture(scope="module")
def run(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("interrupted")
    (folder / "text").mkdir()
    (folder / "text" / "input.py").write_text(inspect.getsource(argparse))
    data = f"--data {folder / 'text'} --data-cache-path {folder / 'cache'} --train-iters {STEPS} --no-save"

    def arguments(layout: Layout) -> tuple[list[str], dict]:
        return f"{MODEL} {TRAINING} {data} {layout.model} {layout.flags}".split(), dict(layout.switches)

    def run(layout: Layout, earlier: list[tuple[str, Layout]], fresh: bool = False) -> list[Job]:
        argv, switches = arguments(layout)
        jobs = [(place, *arguments(each)) for place, each in earlier]
        function = pool.baseline if fresh else pool.run
        return function(
            "tests.distributed.interrupted_job:train",
            layout.world_size,
            argv=argv,
            switches=switches,
            earlier=jobs,
        )

    return run


@pytest.mark.full
@pytest.mark.parametrize("name", CLASSES)
def test_a_job_after_two_that_failed_is_that_of_a_fresh_process(run: Run, name: str) -> None:
    layout = BY_NAME[CLASSES[name]]
    alone = run(layout, [], fresh=True)
    again = run(layout, [("forward", layout), ("backward", layout)])
    for job, reference in zip(again, alone, strict=True):
        assert job.steps == reference.steps
        assert job.tensors == reference.tensors
        assert job.events == reference.events
    for place in range(2):
        assert "failed" in {job.failed[place] for job in again}
