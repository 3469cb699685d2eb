"""A recorded step has the simulator's order on every rank, and recording does not change training."""

from __future__ import annotations

import argparse
import json
from itertools import pairwise

import pytest

import mindspeed_dsa
from mindspeed_dsa.__main__ import main
from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.pipeline.schedule_trace.feature import check_trace
from mindspeed_dsa.features.pipeline.schedule_trace.recorder import Recorder
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.schedule import beside, recorded
from mindspeed_dsa.schedule.events import Costs
from mindspeed_dsa.schedule.simulate import simulate
from tests.support import model
from tests.support.contexts import earlier_world, running
from tests.support.model import losses_of

LAYOUTS = {
    "PP2": (2, {"pp": 2}, 2, 4),
    "PP2 x VPP2": (2, {"pp": 2, "vpp": 2}, 4, 4),
    "one rank": (1, {}, 2, 2),
}


def trained(pool, folder, ranks, layout, layers, microbatches):
    switches = {} if folder is None else {"trace_schedule": str(folder), "trace_schedule_step": 1}
    return pool.run(
        "tests.support.model:run",
        ranks,
        switches=switches,
        overrides={"num_layers": layers},
        num_microbatches=microbatches,
        micro_batch_size=1,
        only="router",
        **layout,
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "VPP2" in name else pytest.mark.full) for name in LAYOUTS]
)
def test_the_real_order_is_the_simulated_one(pool, tmp_path, name, capsys):
    """The order is read from each forward's input and each backward's start."""
    microbatches = LAYOUTS[name][-1]
    traced, plain = (trained(pool, folder, *LAYOUTS[name]) for folder in (tmp_path, None))
    for ours, theirs in zip(traced, plain, strict=True):
        assert losses_of(ours) == losses_of(theirs)
        assert all(ours["gradients"][key].equal(theirs["gradients"][key]) for key in theirs["gradients"])
    comparison = beside.compare(tmp_path, Megatron())
    assert comparison.other_order == []
    assert [len(spans) for spans in comparison.recorded.ranks] == [len(s) for s in comparison.simulated.ranks]
    for spans in comparison.recorded.ranks:
        assert len(spans) == 2 * microbatches * comparison.recorded.schedule.chunks
        assert all(span.start < span.end for span in spans)
        assert all(before.end <= after.start for before, after in pairwise(spans))
    assert len(comparison.differences) == sum(map(len, comparison.recorded.ranks))
    files = [f"--{kind}={tmp_path / kind}" for kind in ("png", "perfetto", "json")]
    assert main(["schedule", "--beside", str(tmp_path), *files]) == 0
    assert "recorded" in capsys.readouterr().out
    written = json.loads((tmp_path / "json").read_text())
    assert written["figures"][0]["step_time"] == comparison.recorded.step_time


def join(folder: str) -> list[bool]:
    """Return which steps are recorded if rank 1 is a reserve in the first one. Runs in the pool's workers."""
    model.start({"trace_schedule": folder, "trace_schedule_step": 2}, pp=2)
    recorder = Recorder(running("schedule-trace"))
    with earlier_world() as is_in_it:
        if is_in_it:
            recorder.begins({})
    return [recorder.begins({}) for _ in range(3)]


def test_a_reserve_rank_joins_after_an_in_process_restart(pool, tmp_path):
    case = "tests.features.pipeline.test_schedule_trace:join"
    assert pool.run(case, 2, folder=str(tmp_path)) == [[False, True, False]] * 2


@pytest.fixture
def folder(tmp_path):
    """Return a folder with two ranks' records of a step in the expected order."""
    layout = recorded.Layout(2, 1, 2, 2, False, False)
    # 1F1B of two ranks: the last rank has no warmup.
    orders = (["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"])
    for rank, order in enumerate(orders):
        rows = [
            [unit[0], 0, int(unit[1]), None, 1.0 * i + rank, 1.0 * i + rank + 0.5]
            for i, unit in enumerate(order)
        ]
        text = json.loads(recorded.text(layout, {"pp": rank, "tp": 0}, 3, []))
        (tmp_path / f"rank-{rank:05d}.json").write_text(json.dumps({**text, "spans": rows}))
    return tmp_path


def change(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_another_order_is_a_problem(folder, capsys):
    assert main(["schedule", "--beside", str(folder)]) == 0
    file = folder / "rank-00001.json"
    rows = json.loads(file.read_text())["spans"]
    # Swaps the second and the third event.
    change(file, spans=[rows[0], rows[2], rows[1], rows[3]])
    assert main(["schedule", "--beside", str(folder)]) == 1
    assert "rank 1 ran another order than the schedule says, from its event 1 on" in capsys.readouterr().out


@pytest.mark.parametrize(
    "layout",
    [
        recorded.Layout(2, 1, 6, 2, False, False),
        recorded.Layout(4, 2, 8, 4, True, True),
        recorded.Layout(2, 2, 6, 2, False, False, v_shaped=True),
        recorded.Layout(4, 2, 9, 4, False, False, split=True, v_shaped=True),
        recorded.Layout(4, 2, 9, 4, True, False, split=True, v_shaped=True),
    ],
    ids=["1F1B", "pairs", "DualPipeV", "DualPipeV, detached", "DualPipeV, detached, in pairs"],
)
def test_a_recording_is_simulated_with_what_it_took(layout, tmp_path):
    """A simulation with the recorded durations of events, messages and gaps equals the recording."""
    # Forward takes as long as backward, so a pair takes half of both.
    took = Costs(forward=2.0, p2p=0.25, between=0.125)
    real = simulate(beside.schedule_of(layout, Megatron()), took)
    for rank, spans in enumerate(real.ranks):
        text = recorded.text(layout, {"pp": rank}, 3, list(spans))
        (tmp_path / f"rank-{rank:05d}.json").write_text(text)
    measured, simulated = beside.compare(tmp_path, Megatron()).figures()
    assert measured.bubble_fraction > 0
    assert simulated.step_time == pytest.approx(real.step_time, rel=1e-6)
    assert simulated.bubble_fraction == pytest.approx(measured.bubble_fraction, rel=1e-6)


def test_where_durations_differ_most(folder):
    file = folder / "rank-00000.json"
    rows = json.loads(file.read_text())["spans"]
    # The second event takes 0.9 instead of 0.5.
    rows[1][5] = rows[1][4] + 0.9
    change(file, spans=rows)
    first = beside.compare(folder, Megatron()).differences[0]
    assert (first.rank, str(first.event)) in {(0, "F0.0"), (0, "F0.1")}
    assert abs(first.recorded_duration - first.simulated_duration) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "rank-00001.json").unlink(), "lacks the file of pipeline rank 1"),
        (lambda folder: (folder / "rank-00001.json").write_bytes(b"\xff\x00"), "not a recorded step"),
        (lambda folder: (folder / "rank-00001.json").write_text("[]"), "not a recorded step"),
        (lambda folder: change(folder / "rank-00001.json", step=4), "different runs"),
    ],
)
def test_files_that_cannot_be_read(folder, damage, words):
    damage(folder)
    with pytest.raises(SettingsError, match=words):
        recorded.read(folder)


def test_what_is_refused_before_training(tmp_path):
    file = tmp_path / "file"
    file.touch()

    def problems(**given):
        values = {"trace_schedule": tmp_path, "trace_schedule_step": 3, "train_iters": 10, **given}
        return list(check_trace(argparse.Namespace(**values), None))

    assert problems() == problems(trace_schedule_step=None) == []
    assert "counted from 1" in problems(trace_schedule_step=0)[0]
    assert "never reached" in problems(train_iters=2)[0]
    assert "is a file" in problems(trace_schedule=file)[0]


def test_a_step_alone_is_refused():
    with pytest.raises(SettingsError, match="--trace-schedule-step 5 records nothing without"):
        mindspeed_dsa.enable(trace_schedule_step=5)
