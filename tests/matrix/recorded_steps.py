"""Training steps that record or replay selections; they run inside the pool's workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

from tests.matrix import sharing_steps
from tests.support import model as job
from tests.support.contexts import running


def step(
    switches: Mapping[str, Any] | None = None, overrides: Mapping[str, Any] | None = None, **arguments: Any
) -> dict[str, Any]:
    """Run :func:`sharing_steps.step`, and count the recorded and the replayed selections."""
    from mindspeed_dsa.features.dsa.selections import record, replay

    train_step, recorded = job.train_step, 0

    def step_and_close(*args: Any, **kwargs: Any) -> Any:
        nonlocal recorded
        result = train_step(*args, **kwargs)
        context = running("dsa-recorded-selections")
        recorder = None if context is None else record.Steps.of(context).recorder
        if recorder is not None:
            recorder.close()
            assert not recorder.failed, recorder.failed
            recorded = recorder.records
        return result

    original = replay.Recorded.found
    with (
        mock.patch.object(job, "train_step", step_and_close),
        mock.patch.object(replay.Recorded, "found", autospec=True, side_effect=original) as replayed,
    ):
        result = sharing_steps.step(switches, overrides, **arguments)
    return {**result, "recorded": recorded, "replayed": replayed.call_count}
