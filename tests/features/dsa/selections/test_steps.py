"""Selections per microbatch of a schedule, in evaluations and after steps that fail."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from mindspeed_dsa import log
from mindspeed_dsa.features.dsa.selections.feature import Numbers, Options
from mindspeed_dsa.features.dsa.selections.format import Key, Recording
from mindspeed_dsa.features.dsa.selections.record import Steps
from mindspeed_dsa.features.dsa.selections.replay import HandedOver
from mindspeed_dsa.megatron.selection_source import Chosen, current
from mindspeed_dsa.schedule.events import Event, Kind
from tests.features.dsa.selections.test_record import rows, selection


class Megatron:
    root = "no_such_megatron"

    def __init__(self, tensor_rank: int = 0, data_rank: int = 0, data_ranks: int = 1) -> None:
        self.state = SimpleNamespace(
            get_tensor_model_parallel_rank=lambda: tensor_rank,
            get_data_parallel_rank=lambda: data_rank,
            get_data_parallel_world_size=lambda: data_ranks,
        )

    def __call__(self, name: str) -> SimpleNamespace:
        assert name == "core.parallel_state"
        return self.state


@pytest.fixture
def selections(monkeypatch):
    """Return a function that makes the selections of a job with some options."""
    made = []
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)

    def make(megatron=None, **options) -> Steps:
        context = SimpleNamespace(
            megatron=megatron or Megatron(), options=Options(**options), log=log.get("test", "megatron")
        )
        steps = Steps(context)
        steps.set_model(SimpleNamespace(num_layers=2, mtp_num_layers=None, dsa_indexer_topk=3))
        made.append(steps)
        return steps

    yield make
    for steps_of_job in made:
        if steps_of_job.recorder is not None:
            steps_of_job.recorder.close()


def run(selections: Steps, forward, microbatches: int = 2, **step) -> None:
    """Run a schedule that calls ``forward`` with each microbatch."""

    def schedule(**_):
        for number in range(microbatches):
            events = [Event(Kind.FORWARD, 0, number)]
            if selections.following:
                selections.before(events)
            forward(current().microbatch)
            if selections.following:
                selections.after(events)

    selections.run(schedule, (), step)


def take(microbatch) -> None:
    if microbatch is not None and microbatch.sink is not None:
        for layer in (1, 2):
            microbatch.sink.took(rows(layer), Chosen((selection(),)), mass_of=None)


def test_places_count_over_data_parallel_ranks(selections, tmp_path):
    steps = selections(Megatron(data_rank=1, data_ranks=3), record=tmp_path, steps=Numbers.of("2"))
    for _ in range(3):
        run(steps, take)
    steps.recorder.flush()
    assert Recording.open(tmp_path).places() == [Key(2, place, layer) for place in (1, 4) for layer in (1, 2)]


def test_other_tensor_parallel_ranks_write_nothing(selections, tmp_path):
    found = selections(Megatron(tensor_rank=1), record=tmp_path)
    run(found, take)
    assert found.recorder is None
    assert not list(tmp_path.iterdir())


def test_an_evaluation_replays_what_is_handed_over_and_records_nothing(selections, tmp_path):
    steps, sources = selections(record=tmp_path, replay=None, with_batch=True), []

    def forward(microbatch):
        sources.append(microbatch.source)
        take(microbatch)

    run(steps, forward, forward_only=True)
    run(steps, forward)
    run(steps, forward, forward_only=True)
    steps.recorder.flush()
    assert [type(source) for source in sources] == [HandedOver] * 6
    assert len(set(map(id, sources))) == 6
    recording = Recording.open(tmp_path)
    assert recording.places() == [Key(1, place, layer) for place in (0, 1) for layer in (1, 2)]
    assert all(recording.count(place) == len(selection()[0]) for place in recording.places())


def test_an_evaluation_of_a_recorded_job_is_not_followed(selections, tmp_path):
    steps, seen = selections(record=tmp_path), []
    run(steps, seen.append, forward_only=True)
    assert seen == [None, None]
    assert steps.recorder is None


@pytest.mark.parametrize("forward_only", [False, True])
def test_a_step_that_fails_leaves_no_microbatch(selections, forward_only):
    steps = selections(with_batch=True)

    def fail(microbatch):
        assert microbatch is not None
        raise ArithmeticError("no memory")

    with pytest.raises(ArithmeticError):
        run(steps, fail, forward_only=forward_only)
    assert current().microbatch is None
    assert not steps.following


def test_steps_that_the_job_skips_are_removed_from_an_older_recording(selections, monkeypatch, tmp_path):
    """Megatron-LM calls no schedule for --iterations-to-skip: the first call is that of step 5."""
    older = selections(record=tmp_path)
    older.begins({})
    for step in (2, 3, 4):
        older.recorder.take(Key(step, 0, 1), rows(), Chosen((selection(),)))
    older.recorder.close()
    args = SimpleNamespace(curr_iteration=4, iteration=2)
    variables = SimpleNamespace(_GLOBAL_ARGS=args)
    monkeypatch.setitem(sys.modules, "no_such_megatron.training.global_vars", variables)
    newer = selections(record=tmp_path)
    newer.begins({})
    newer.recorder.take(Key(5, 0, 1), rows(), Chosen((selection(),)))
    newer.recorder.close()
    assert [key.step for key in Recording.open(tmp_path).places()] == [2, 5]
