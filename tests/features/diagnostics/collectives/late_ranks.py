"""Training steps in which one rank reaches a collective late, or never."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from mindspeed_dsa.runs import collectives
from mindspeed_dsa.tools.hang import waits
from tests.features.dsa import cp_cases
from tests.features.moe.balanced_experts.popular_experts import ALWAYS as HOT_EXPERTS
from tests.support import model

GROUPS = {
    "TP": "get_tensor_model_parallel_group",
    "PP": "get_pipeline_model_parallel_group",
    "CP": "get_context_parallel_group",
    "DP": "get_data_parallel_group",
    "EP": "get_expert_model_parallel_group",
    "EDP": "get_expert_data_parallel_group",
}
LATE = 1
FEW = {"num_microbatches": 2, "micro_batch_size": 1}
HALVES = {"moe_batch_overlap": True, "moe_batch_overlap_always": True}
CHAIN = {"switches": HOT_EXPERTS, "overrides": {"num_moe_experts": 8}, "ep": 4, **FEW}
JOBS: dict[str, tuple[dict[str, Any], str]] = {
    "TP": ({"switches": {"use_ascend_coc": True}, "tp": 2}, "linear layer of layer 1, microbatch 0, forward"),
    "TP, Megatron's": ({"tp": 2, **FEW}, "layer 2, microbatch 1, backward"),
    "EP": (
        {"switches": {"moe_alltoall_overlap_comm": True}, "ep": 2, **FEW},
        "dispatch of layer 2, microbatch 1",
    ),
    "EP, backward": (
        {"switches": {"moe_alltoall_overlap_comm": True}, "ep": 2, **FEW},
        "gradient of combine of layer 2, microbatch 1, backward",
    ),
    "EP, Megatron's": ({"ep": 2}, "combine of layer 2, microbatch 0, forward"),
    "EP, pairs": (
        {"switches": {"moe_fb_overlap": True}, "ep": 2, **FEW},
        "dispatch of layer 2, microbatch 1, forward beside",
    ),
    "EP, chains": ({"switches": HOT_EXPERTS, "ep": 2, **FEW}, "weights of expert"),
    "EP, chain of 4 ranks": (CHAIN, "weights of expert 0 along ranks 0 > 1 > 2 > 3"),
    "EP, chain of 4 ranks, backward": (CHAIN, "gradients of expert 0 along ranks 3 > 2 > 1 > 0"),
    "EP, halves": (
        {"switches": {**HALVES, "moe_batch_overlap_attention": True}, "ep": 2, "num_microbatches": 2},
        "combine of layer 2, half 1 of microbatch 1, forward",
    ),
    "EP, halves behind the router": (
        {"switches": {**HALVES, "moe_batch_overlap_attention": False}, "ep": 2, **FEW},
        "gradient of dispatch of layer 2, half 0 of microbatch 1, backward",
    ),
    "CP": (
        {"switches": {"use_fused_dsa": True}, "cp": 2},
        "keys of the sequence of layer 1, microbatch 0, forward",
    ),
    "PP": ({"pp": 2, **FEW}, ""),
    "DP": ({}, ""),
    "EDP": ({"ep": 2}, ""),
}
"""Dict from the group in which a rank is late to the step, and to a part of the collective's name."""


def kind_of(case: str) -> str:
    """Return the kind of group of a case."""
    return case.partition(",")[0]


def ranks_of(case: str) -> int:
    """Return the number of ranks of a case; a late rank of expert data parallelism has peers elsewhere."""
    return 4 if kind_of(case) == "EDP" else JOBS[case][0].get("ep", 2)


def train(
    folder: str, kind: str, what: str, switches: Any = None, step: str = "tests.support.model:run", **job: Any
) -> dict[str, Any]:
    """Run a step in which one rank is late, while all ranks write the calls that they wait for.

    Args:
        folder: directory of the records.
        kind: kind of group of the late collective.
        what: part of that collective's name; the first match is late.
        switches: feature switches.
        step: import path of the function that runs the step.
        job: further arguments of ``step``.
    """
    module, _, name = step.partition(":")
    run = cp_cases.step if "cp" in job else getattr(import_module(module), name)
    # Waiting calls are written soon, so that the test is short.
    soon = mock.patch("mindspeed_dsa.features.diagnostics.collectives.watch._PERIOD_S", 0.1)
    with soon, late(kind, what, lambda: oversleep(Path(folder))) as slept:
        result = run(switches={**(switches or {}), "record_collectives": folder}, **job)
    assert bool(slept) == (dist.get_rank() == LATE)
    return result


@contextmanager
def late(kind: str, what: str, act: Callable[[], None]) -> Iterator[list[str]]:
    """Call ``act`` on one rank before it enters a collective; yields the collective's name."""
    from mindspeed_dsa.features.diagnostics.collectives.recorder import Recorder
    from mindspeed_dsa.parallel import names

    met: list[str] = []
    original = Recorder.run

    def run(self: Any, function: Any, describe: Any, args: Any, kwargs: Any) -> Any:
        from megatron.core import parallel_state

        name = str(names.current())
        # Gradients are reduced over the group that includes context parallel ranks.
        options = {"with_context_parallel": True} if kind == "DP" else {}
        awaited = dist.get_rank() == LATE and not met and what in name
        if awaited and describe(*args, **kwargs).group is getattr(parallel_state, GROUPS[kind])(**options):
            met.append(name)
            act()
        return original(self, function, describe, args, kwargs)

    with mock.patch.object(Recorder, "run", run):
        yield met


def oversleep(folder: Path) -> None:
    """Sleep while a thread requests records, so that this rank's stack always ends here."""
    thread = threading.Thread(target=ask_for_records, args=(folder,))
    thread.start()
    while thread.is_alive():
        time.sleep(0.5)


def ask_for_records(folder: Path) -> None:
    """Request records of all ranks until one of them shows a call that has waited for over a second."""
    for _ in range(30):
        time.sleep(1.1)
        asked, records = time.time(), list[collectives.Record]()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        while (
            time.time() < asked + 30
            and sum(record.time > asked for record in records) < dist.get_world_size()
        ):
            time.sleep(0.05)
            with contextlib.suppress(collectives.RunError):  # the job's folder may not exist yet
                records = [record for record in collectives.read(folder) if record.reason]
        times = {record.rank: record.time for record in records}
        for wait in waits.find(records).waits:
            if any(call and times[rank] - call.started > 1 for rank, call in wait.arrived.items()):
                return


def never(folder: str, fate: str, case: str) -> None:
    """Run a rank of a job in which one rank is killed, fails or freezes before a collective."""

    def act() -> None:
        if fate == "failed":
            raise ValueError("a bad batch")
        # Written while a busy machine built the model without any call.
        for early in Path(folder).glob("*/rank-*.json"):
            early.unlink()
        os.kill(os.getpid(), signal.SIGKILL if fate == "killed" else signal.SIGSTOP)

    dist.init_process_group("gloo")
    job, what = JOBS[case]
    run = cp_cases.step if "cp" in job else model.run
    recording = {"record_collectives": folder, "record_collectives_after": 3.0}
    with late(kind_of(case), what, act):
        run(**{**job, "switches": {**job.get("switches", {}), **recording}})


if __name__ == "__main__":
    never(*sys.argv[1:])
