"""Steps of a pipeline of two ranks; one rank is killed when it reaches a given forward of its list.

``python -m tests.features.pipeline.lost_ranks CASE FORWARD FOLDER`` runs a rank with torchrun's environment.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any
from unittest import mock

import torch.distributed as dist

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.diagnostics.collectives.recorder import Recorder
from mindspeed_dsa.schedule import lists, megatron_order
from mindspeed_dsa.schedule.events import Event, Kind, Schedule
from tests.support import model

LOST, MICROBATCHES = 1, 6
JOBS: dict[str, dict[str, Any]] = {
    "DualPipeV": {"vpp": 2, "switches": {"schedules_method": "dualpipev"}},
    "DualPipeV, weight gradients later": {
        "vpp": 2,
        "switches": {"schedules_method": "dualpipev", "dualpipev_dw_detach": True},
    },
    "split backward": {"switches": {"split_backward": True}},
}


def schedule(case: str) -> Schedule:
    """Return the lists of events that a case runs."""
    if "V" in case:
        return lists.dual_pipe_v(2, MICROBATCHES, paired=False, split="later" in case)
    return lists.weights_later(megatron_order.schedule(Megatron(), 2, 1, MICROBATCHES))


def stops_before(case: str, forward: int) -> tuple[Event, Event]:
    """Return the other rank's first event whose input never arrives, and the event before it.

    Args:
        case: a key of :data:`JOBS`.
        forward: index of the lost rank's forward, from 0, at which it is killed.
    """
    listed = schedule(case)
    events = listed.ranks[LOST]
    killed = [index for index, event in enumerate(events) if event.kind is Kind.FORWARD][forward]
    # Units that the killed rank no longer sends; weight gradients send nothing.
    missing = {listed.next_unit(LOST, event) for event in events[killed:] if event.kind is not Kind.WEIGHT}
    before = None
    for event in listed.ranks[1 - LOST]:
        if (event.kind, listed.stage(1 - LOST, event.chunk), event.microbatch) in missing:
            assert before is not None
            return event, before
        before = event
    raise AssertionError("the other rank ends its list")


def run(case: str, forward: int, folder: str) -> None:
    """Run a rank.

    Args:
        case: a key of :data:`JOBS`.
        forward: index of the forward, as in :func:`stops_before`.
        folder: directory for records of collectives; empty for no records.
    """
    dist.init_process_group("gloo")
    original, count = model.forward_step, 0

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        if dist.get_rank() == LOST and count == forward:
            time.sleep(2)  # lets earlier messages arrive
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
        return original(*args, **kwargs)

    kept: list[Any] = []  # kept as by a job's session, which outlives its model

    def keep(self: Any, context: Any) -> None:
        kept.append(self)
        make(self, context)

    make = Recorder.__init__
    recording = {"record_collectives": folder, "record_collectives_after": 60.0} if folder else {}
    job = JOBS[case]
    with (
        mock.patch.object(model, "forward_step", forward_step),
        mock.patch.object(Recorder, "__init__", keep),
    ):
        model.run(
            {**job["switches"], **recording},
            pp=2,
            vpp=job.get("vpp"),
            num_microbatches=MICROBATCHES,
            micro_batch_size=1,
            overrides={"num_layers": 4},
        )


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), sys.argv[3])
