"""The job on the ranks of a pool, with everything that it records on disk at the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.support import example_job
from tests.support.contexts import running

FEATURE = "dsa-recorded-selections"


def train(argv: Sequence[str], **arguments: Any) -> example_job.RankOutcome:
    """Run the job as :func:`example_job.train` does, and wait for its recorder."""
    from mindspeed_dsa.features.dsa.selections.record import steps_of

    outcome = example_job.train(argv, **arguments)
    context = running(FEATURE)
    assert context is not None
    recorder = steps_of(context).recorder
    if recorder is not None:
        recorder.close()
        assert not recorder.failed, recorder.failed
    return outcome


def train_handing_over(argv: Sequence[str], *, handed: str, **arguments: Any) -> example_job.RankOutcome:
    """Run it with a forward step that hands over the selections of a recording, sequence by sequence.

    Args:
        argv: as of :func:`train`.
        handed: folder of the recording.
        **arguments: likewise.
    """
    from dsa_job import step as job_step
    from megatron.core import parallel_state

    from mindspeed_dsa.features.dsa.selections.format import Recording
    from mindspeed_dsa.features.dsa.selections.record import steps_of
    from mindspeed_dsa.features.dsa.selections.replay import hand_over

    recording, original, calls = Recording.open(Path(handed)), job_step.forward_step, 0
    # Of a step, on this rank: Megatron's samplers deal each microbatch to the data parallel ranks in turn.
    batch, sequences = 2, max(place.sequence for place in recording.places()) + 1

    def forward_step(*parts: Any) -> Any:
        nonlocal calls
        context = running(FEATURE)
        assert context is not None
        ranks, rank = (
            parallel_state.get_data_parallel_world_size(),
            parallel_state.get_data_parallel_rank(),
        )
        first, calls = (calls * ranks + rank) * batch % sequences, calls + 1
        step = steps_of(context).step
        arrays = [recording.array(step, first + each) for each in range(batch)]
        # In any order, as an engine's kernels leave them.
        hand_over(torch.from_numpy(np.stack(arrays)[..., ::-1].copy()))
        return original(*parts)

    with mock.patch.object(job_step, "forward_step", forward_step):
        return train(argv, **arguments)
