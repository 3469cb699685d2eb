"""Rank entry points of the job that wait until its recorded selections are on disk."""

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
    """Run :func:`example_job.train`, then close the selection recorder and check that it did not fail."""
    from mindspeed_dsa.features.dsa.selections.record import Steps

    outcome = example_job.train(argv, **arguments)
    context = running(FEATURE)
    assert context is not None
    recorder = Steps.of(context).recorder
    if recorder is not None:
        recorder.close()
        assert not recorder.failed, recorder.failed
    return outcome


def train_handing_over(argv: Sequence[str], *, handed: str, **arguments: Any) -> example_job.RankOutcome:
    """Train with a forward step that passes recorded selections to ``replay.hand_over``.

    Args:
        argv: command-line flags, as in :func:`train`.
        handed: directory of the recording.
        **arguments: keyword arguments of :func:`train`.
    """
    from dsa_job import step as job_step
    from megatron.core import parallel_state

    from mindspeed_dsa.features.dsa.selections.format import Recording
    from mindspeed_dsa.features.dsa.selections.record import Steps
    from mindspeed_dsa.features.dsa.selections.replay import hand_over

    recording, original, calls = Recording.open(Path(handed)), job_step.forward_step, 0
    # Microbatches of a step on this rank: Megatron's samplers deal them to the data parallel ranks in turn.
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
        step = Steps.of(context).step
        arrays = [recording.array(step, first + each) for each in range(batch)]
        # Reversed: an inference engine's kernels may return the keys in any order.
        hand_over(torch.from_numpy(np.stack(arrays)[..., ::-1].copy()))
        return original(*parts)

    with mock.patch.object(job_step, "forward_step", forward_step):
        return train(argv, **arguments)
