"""Simulated steps: times that can be derived by hand or were published, and the figures from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_dsa.__main__ import main
from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.schedule import lists
from mindspeed_dsa.schedule.events import Costs, Event, Kind, Schedule
from mindspeed_dsa.schedule.megatron_order import schedule
from mindspeed_dsa.schedule.report import figures
from mindspeed_dsa.schedule.simulate import simulate

MEGATRON = Megatron()
THIRD = Costs(all_to_all_forward=0.5, all_to_all_backward=1.0)
"""Forward 1 and backward 2; all-to-all is a third of the serial time."""
NONE = Costs()


def step(costs, *layout, **more):
    return simulate(schedule(MEGATRON, *layout, **more), costs).step_time


@pytest.mark.parametrize(
    ("layout", "bound", "serial", "paired", "extra", "ends"),
    [
        ((4, 2, 8), 57, 85.5, 79.5, 69, 63),
        ((16, 2, 64), 429, 643.5, 571.5, 477, 453),
        ((16, 2, 60, 20), 405, 607.5, 547.5, 459, 432),
    ],
)
def test_hidden_communication(layout, bound, serial, paired, extra, ends):
    assert step(NONE, *layout) == bound
    assert step(THIRD, *layout) == serial
    assert step(THIRD, *layout, paired=True) == paired
    assert step(THIRD, *layout, paired=True, extra_warmup=True) == extra
    assert step(replace(THIRD, hidden_alone=0.5), *layout, paired=True, extra_warmup=True) == ends
    assert step(NONE, *layout, paired=True, extra_warmup=True) == bound


@pytest.mark.parametrize(
    ("layout", "plain", "ahead"),
    [((4, 1, 8), 44, 41), ((4, 2, 8), 76, 73), ((8, 1, 32), 156, 149), ((16, 2, 64), 572, 557)],
)
def test_recompute_ahead_of_the_gradient(layout, plain, ahead):
    """It removes (ranks - 1) recomputations of a chunk from the step."""
    assert step(NONE, *layout, recompute="in place") == plain
    assert step(NONE, *layout, recompute="in advance") == ahead
    assert step(NONE, *layout, recompute="in bubbles") == ahead
    assert plain - ahead == layout[0] - 1


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (8, 32)])
@pytest.mark.parametrize(("f", "x", "w"), [(1.0, 1.0, 1.0), (1.0, 1.5, 0.5)])
def test_zero_bubble_by_its_formula(ranks, microbatches, f, x, w):
    """The bubble is ``(p - 1)(F + B - W)`` on each rank, with no more activations than 1F1B."""
    costs = Costs(forward=f, input_gradient=x, weight_gradient=w)
    timeline = simulate(lists.zero_bubble(ranks, microbatches), costs)
    assert timeline.step_time == pytest.approx(microbatches * (f + x + w) + (ranks - 1) * (f + x - w))
    assert max(figures(timeline, costs).chunks_in_flight) == ranks


def test_dual_pipe_v_is_no_faster_than_one_more_warmup():
    costs = figures(simulate(lists.dual_pipe_v(4, 16), THIRD), THIRD)
    assert costs.step_time >= step(THIRD, 4, 2, 16, paired=True, extra_warmup=True)
    assert costs.steady_hidden_worst == 1.0


def test_figures_of_pairs():
    stock = figures(simulate(schedule(MEGATRON, 16, 2, 64, paired=True), THIRD), THIRD)
    extra = figures(simulate(schedule(MEGATRON, 16, 2, 64, paired=True, extra_warmup=True), THIRD), THIRD)
    assert stock.steady_hidden_worst == pytest.approx(48 / 112)
    assert stock.steady_hidden_mean == pytest.approx(0.96, abs=0.005)
    assert (extra.steady_hidden_mean, extra.steady_hidden_worst) == (1.0, 1.0)
    assert (stock.chunks_in_flight[0], extra.chunks_in_flight[0]) == (47, 48)
    assert [b - a for a, b in zip(stock.chunks_in_flight, extra.chunks_in_flight, strict=True)] == [1] * 16
    assert stock.peak_memory == tuple(map(float, stock.chunks_in_flight))


def test_memory_of_recomputed_and_split_backwards():
    costs = Costs(activations=4.0, checkpoint=1.0, weight_activations=0.5)
    one = figures(simulate(schedule(MEGATRON, 1, 1, 2, recompute="in place"), costs), costs)
    assert one.peak_memory == (5.0,)  # a checkpoint, and the activations recomputed from it
    four = figures(simulate(lists.zero_bubble(4, 8), costs), costs)
    # The last rank keeps one whole microbatch, and the inputs of weight gradients of three more.
    assert four.peak_memory[-1] == 4.0 + 3 * 2.0


def test_bubbles_and_p2p():
    plain = simulate(schedule(MEGATRON, 4, 1, 8), NONE)
    assert figures(plain, NONE).bubble_fraction == pytest.approx(3 / 11)
    late = Costs(p2p=0.25)
    assert step(late, 2, 1, 1) == 6 + 2 * 0.25


def test_the_table_of_split_backwards():
    """The reference is the table in docs/features/split-backward.md."""
    page = Path(__file__).parents[2] / "docs/features/split-backward.md"
    table = page.read_text(encoding="utf-8").partition("<!-- simulated:begin -->\n")[2]
    shown = [line.split(" | ")[1:] for line in table.partition("<!-- simulated:end -->")[0].splitlines()[2:]]
    one, two = (schedule(MEGATRON, 4, chunks, 16) for chunks in (1, 2))
    apart = [lists.weights_later(one, waiting) for waiting in (0, 1, 2, None)]
    costs = Costs(forward=1, input_gradient=1, weight_gradient=1)
    for row, each in zip(shown, [one, *apart, two, lists.weights_later(two, None)], strict=True):
        found = figures(simulate(each, costs), costs)
        step, bubble, memory = found.step_time, found.bubble_fraction, max(found.peak_memory)
        assert row == [f"{step:.0f}", f"{100 * bubble:.1f} %", f"{memory:.0f} |"]


def test_measured_times_take_the_place_of_costs():
    """``--beside`` measures times by kind of event and stage, transfers included."""
    measured = {(Kind.FORWARD, 1): 3.0, (Kind.BACKWARD, 1): 6.0}
    assert step(Costs(measured=measured, all_to_all_forward=0.5), 2, 1, 1) == 1.5 + 9 + 2


def test_a_deadlock_is_named():
    forward, backward = Event(Kind.FORWARD, 0, 0), Event(Kind.BACKWARD, 0, 0)
    with pytest.raises(
        SettingsError, match=r"rank 0 waits for F of stage 0, microbatch 0, before B0.0; rank 1"
    ):
        simulate(Schedule("mine", ((backward, forward), (forward, backward)), 1, 1), NONE)


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.integers(1, 6),
    chunks=st.integers(1, 3),
    groups=st.integers(1, 3),
    wider=st.integers(0, 3),
    rest=st.integers(0, 8),
    paired=st.booleans(),
    extra=st.booleans(),
)
def test_no_shape_deadlocks(ranks, chunks, groups, wider, rest, paired, extra):
    """Covers all shapes that Megatron accepts; a pair waits only for units that end without it."""
    group = ranks + wider
    rest %= group
    microbatches = groups * group + (rest if rest >= ranks else 0)
    if ranks == 1:
        chunks = 1
    elif chunks == 1:
        paired = extra = False
    made = schedule(MEGATRON, ranks, chunks, microbatches, group, paired=paired, extra_warmup=extra)
    work = microbatches * chunks * 3
    assert step_of(made) >= work


def step_of(made):
    return simulate(made, NONE).step_time


@pytest.mark.parametrize("wrong", [{"forward": -1.0}, {"hidden_alone": 1.5}, {"p2p": float("nan")}])
def test_costs_that_are_none(wrong):
    with pytest.raises(SettingsError, match="schedule: "):
        Costs(**wrong)


def test_the_command(tmp_path, capsys):
    """Covers its table, its files, and equal work of a rank in every schedule."""
    files = {name: tmp_path / f"s.{name}" for name in ("png", "perfetto", "json")}
    argv = (
        "schedule --virtual 2 --num-microbatches 8 --all-to-all-forward 0.5 --all-to-all-backward 1".split()
    )
    assert main([*argv, "--schedules", "1f1b,zero-bubble", "--png", str(files.pop("png"))]) == 0
    argv += ["--schedules", "all"]
    assert main([*argv, *(word for name, file in files.items() for word in (f"--{name}", str(file)))]) == 0
    assert "interleaved 1F1B, paired, +1 warmup" in capsys.readouterr().out
    rows = {row["schedule"]: row for row in json.loads(files["json"].read_text())}
    assert rows["interleaved 1F1B"]["step_time"] == 85.5
    assert rows["zero bubble (ZB-H1)"]["step_time"] > 8 * 2 * 4.5
    assert (tmp_path / "s.png").read_bytes()[:4] == b"\x89PNG"
    trace = json.loads(files["perfetto"].read_text())["traceEvents"]
    assert {event["pid"] for event in trace} == set(range(len(rows)))
    drawn = [event for event in trace if event["ph"] == "X" and event["pid"] == 0]
    assert len(drawn) == 4 * 2 * 8 * 2
    assert max(event["ts"] + event["dur"] for event in drawn) == 85.5e3


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--schedules", "mine"], "no schedule 'mine'"),
        (["--virtual", "2", "--num-microbatches", "6"], "4 or 8 microbatches"),
        (["--beside", "nowhere"], "--trace-schedule nowhere"),
        (["--forward", "-1"], "give a number >= 0"),
        (["--schedules", "1f1b,paired"], "use at least 2 chunks"),
        (["--schedules", "zero-bubble", "--forward-only"], "a schedule of training"),
    ],
)
def test_the_command_refuses(argv, words, capsys):
    assert main(["schedule", *argv]) == 2
    assert words in capsys.readouterr().err


PLACES = ("place", "bubbles", "advance")


@pytest.mark.parametrize(
    ("argv", "shown", "left_out"),
    [
        ([], ["1F1B"], ["paired", "paired-extra"]),
        (["--virtual", "2", "--forward-only"], ["interleaved 1F1B"], ["paired", "paired-extra"]),
        (
            ["--num-microbatches", "4", "--schedules", "all"],
            [
                "1F1B",
                *(f"1F1B, recompute in {where}" for where in PLACES),
                "1F1B, split",
                "zero bubble (ZB-H1)",
            ],
            ["paired", "paired-extra", "paired-split", "dualpipev", "dualpipev-dw-detach"],
        ),
    ],
)
def test_schedules_that_a_layout_does_not_have_are_left_out(argv, shown, left_out, capsys):
    """Schedules that are named are not left out."""
    assert main(["schedule", *argv]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:] if not line.startswith("left out")] == shown
    assert [line.split(":")[1].strip() for line in lines if line.startswith("left out")] == left_out
