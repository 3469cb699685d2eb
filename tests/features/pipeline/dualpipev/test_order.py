"""DualPipeV training runs the simulator's list of events on every rank; evaluation runs its forwards."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch

from mindspeed_dsa.__main__ import main
from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.pipeline.dualpipev.transfers import Transfers
from mindspeed_dsa.schedule import beside, lists, recorded
from mindspeed_dsa.schedule.events import Costs, Kind
from mindspeed_dsa.schedule.report import figures
from mindspeed_dsa.schedule.simulate import simulate
from tests.features.pipeline.dualpipev import in_flight
from tests.support import model
from tests.support.model import losses_of, put_together

V = {"schedules_method": "dualpipev"}


def trained(pool, folder, ranks, microbatches, layers, pp, only="router", **more):
    switches = {**V, "trace_schedule": str(folder), "trace_schedule_step": 1, **more.pop("switches", {})}
    return pool.run(
        "tests.features.pipeline.dualpipev.in_flight:run",
        ranks,
        switches=switches,
        overrides={"num_layers": layers, **more.pop("overrides", {})},
        num_microbatches=microbatches,
        micro_batch_size=1,
        only=only,
        pp=pp,
        vpp=2,
        **more,
    )


def assert_as_many_alive_as_listed(ranks, schedule, pp):
    """Check the number of live forwards of one pipeline's ranks, before each block and at most."""
    # Deferred weight gradients keep activations alive, so the simulation counts them.
    everything_waits = Costs(weight_activations=1.0)
    kept = figures(simulate(schedule, everything_waits), everything_waits).peak_memory
    for rank in range(pp):
        rank_result = ranks[rank * len(ranks) // pp]
        assert rank_result["counts"] == in_flight.listed(schedule, rank)
        assert rank_result["most"] == kept[rank]
        assert rank_result["steps_left"] == 0


@pytest.mark.parametrize(
    ("pp", "microbatches", "layers", "layout"),
    [
        pytest.param(2, 4, 4, None, marks=pytest.mark.full),
        (2, 7, 5, "Et|tt|t|tL"),
        pytest.param(4, 9, 8, None, marks=pytest.mark.full),
        pytest.param(8, 16, 16, None, marks=pytest.mark.full),
    ],
)
def test_the_recorded_order_is_the_list(pool, tmp_path, pp, microbatches, layers, layout, capsys):
    overrides = {"pipeline_model_parallel_layout": layout} if layout else {}
    ranks = trained(pool, tmp_path, pp, microbatches, layers, pp, overrides=overrides)
    alone = pool.run(
        "tests.support.model:run",
        1,
        overrides={"num_layers": layers},
        num_microbatches=microbatches,
        micro_batch_size=1,
        only="router",
    )
    expected = put_together(alone)
    gradients = put_together(ranks)
    assert gradients.keys() == expected.keys()
    assert all(gradients[name].equal(expected[name]) for name in expected)
    assert [losses_of(rank) for rank in ranks] == [[]] * (pp - 1) + [losses_of(alone[0])]
    layout, recording = recorded.read(tmp_path)
    assert layout.v_shaped
    listed = lists.dual_pipe_v(pp, microbatches, paired=False)
    assert recording.schedule.ranks == listed.ranks
    assert_as_many_alive_as_listed(ranks, listed, pp)
    assert beside.compare(tmp_path, Megatron()).other_order == []
    assert main(["schedule", "--beside", str(tmp_path)]) == 0
    assert "DualPipeV" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize(
    ("pp", "layers"), [(2, 4), pytest.param(4, 8, marks=pytest.mark.full)], ids=["PP2", "PP4"]
)
def test_weight_gradients_wait_where_the_list_has_them(pool, tmp_path, pp, layers):
    microbatches = 2 * pp + 1
    detached = {"dualpipev_dw_detach": True}
    ranks = trained(pool, tmp_path, pp, microbatches, layers, pp, only="", switches=detached)
    whole = trained(pool, tmp_path / "whole", pp, microbatches, layers, pp, only="")
    ours, theirs = put_together(ranks), put_together(whole)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not ours[name].equal(theirs[name])] == []
    _, found = recorded.read(tmp_path)
    listed = lists.dual_pipe_v(pp, microbatches, paired=False, split=True)
    assert found.schedule.ranks == listed.ranks
    weights = [event for events in listed.ranks for event in events if event.kind is Kind.WEIGHT]
    assert len(weights) == pp * 2 * microbatches
    assert_as_many_alive_as_listed(ranks, listed, pp)
    assert beside.compare(tmp_path, Megatron()).other_order == []


def most_on_their_way(**arguments):
    """Return the maximum number of messages that a step holds at one time."""
    most = 0
    hand_on = Transfers.hand_on

    def counted(self, *args):
        nonlocal most
        hand_on(self, *args)
        most = max(most, sum(map(len, self._leaving.values())))

    with mock.patch.object(Transfers, "hand_on", counted):
        model.run(V, **arguments)
    return most


@pytest.mark.full
@pytest.mark.parametrize(("pp", "layers"), [(2, 4), (4, 8)])
def test_messages_are_let_go_when_they_have_been_used(pool, pp, layers):
    """A longer step does not hold more messages; a gloo send is complete once something waits for it."""
    few, many = (
        pool.run(
            f"{__name__}:most_on_their_way",
            pp,
            overrides={"num_layers": layers},
            num_microbatches=microbatches,
            micro_batch_size=1,
            pp=pp,
            vpp=2,
        )
        for microbatches in (2 * pp + 2, 4 * pp + 4)
    )
    # Twice as many microbatches do not raise the maximum.
    assert few == many
    assert max(many) <= 2 * pp


@pytest.mark.full
def test_pairs_share_blocks(pool, tmp_path):
    ranks = trained(pool, tmp_path, 4, 5, 4, 2, switches={"moe_fb_overlap": True}, ep=2)
    assert [len(losses_of(rank)) for rank in ranks] == [0, 0, 5, 5]
    layout, recording = recorded.read(tmp_path)
    assert layout.paired
    listed = lists.dual_pipe_v(2, 5)
    assert recording.schedule.ranks == listed.ranks
    assert_as_many_alive_as_listed(ranks, listed, 2)
    assert any(event.pair is not None for event in recording.schedule.ranks[0])


def evaluated(pp, microbatches, switches=None):
    """Return an evaluation's losses, on the rank where Megatron expects them."""
    model.start(switches, pp=pp, vpp=2 if pp > 1 else None)
    from megatron.core.pipeline_parallel import get_forward_backward_func

    chunks = 2 if pp > 1 else None
    cfg = model.config(
        num_layers=4, pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=chunks
    )
    parts = [model.gpt_model(cfg, vp_stage=stage if chunks else None) for stage in range(chunks or 1)]
    batches = list(model.samples(microbatches).view(microbatches, 1, -1))
    with torch.no_grad():
        losses = get_forward_backward_func()(
            forward_step_func=partial(model.forward_step, cfg),
            data_iterator=[iter(batches) for _ in parts],
            model=parts,
            num_microbatches=microbatches,
            seq_length=model.SEQUENCE,
            micro_batch_size=1,
            forward_only=True,
        )
    return [float(each["lm loss"]) for each in losses]


@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.full), 3])
def test_an_evaluation_reports_on_the_last_rank(pool, microbatches):
    """The losses equal one process's, for any number of microbatches."""
    (expected,) = pool.run(f"{__name__}:evaluated", 1, pp=1, microbatches=microbatches)
    assert len(expected) == microbatches
    assert pool.run(f"{__name__}:evaluated", 2, pp=2, microbatches=microbatches, switches=V) == [[], expected]


@pytest.mark.parametrize("microbatches", [1, 3, 8])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_an_evaluation_waits_for_nothing_once_it_runs(ranks, microbatches):
    schedule = lists.dual_pipe_v_forwards(ranks, microbatches)
    timeline = simulate(schedule, Costs())
    assert {event.kind for events in schedule.ranks for event in events} == {Kind.FORWARD}
    # The time through all chunks, and two forwards per further microbatch.
    assert timeline.step_time == 2 * ranks + 2 * (microbatches - 1)


@pytest.mark.parametrize("microbatches", [8, 9, 20])
def test_without_split_backwards_nothing_else_changes(microbatches):
    whole, split = (lists.dual_pipe_v(4, microbatches, split=split) for split in (False, True))
    kept = [[event for event in events if event.kind is not Kind.WEIGHT] for events in split.ranks]
    assert [list(events) for events in whole.ranks] == kept
    assert simulate(whole, Costs()).step_time >= simulate(split, Costs()).step_time
