"""One layer's routed experts on simulated links: transfers, plans, and the command that draws them."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.runs import expert_load
from mindspeed_dsa.schedule.events import Kind
from mindspeed_dsa.tools.cli import schedule
from mindspeed_dsa.tools.planner.expert_step import Layer, Links, compare, imbalance_of, imbalanced, routed

SMALL = Layer(8, experts=32, topk=4, hidden=1024, width=512, tokens=2048)
NODES = Links(4, 100e9, 10e9, 1e-6)
MATMUL = 50e12


def passed(links: Links, back: bool, step) -> list[tuple[float, float]]:
    """Return each rank's start and end of transfers in forward or backward; equal without any."""
    found = []
    for spans in step.timeline.ranks:
        mine = [s for s in spans if s.event.kind is Kind.PASSED and s.event.chunk == back]
        found.append((mine[0].start, mine[0].end) if mine else (0.0, 0.0))
    return found


@pytest.mark.parametrize("links", [Links(8, 100e9, 10e9, 1e-6), NODES], ids=("one node", "two nodes"))
def test_one_expert_passes_in_the_time_of_its_pieces_and_hops(links):
    """Without other transfers, the last rank has everything after pieces + hops - 1 pieces."""
    counts = routed(SMALL, [1] * 32)
    counts[:, 0] += 4000
    _, step = compare(SMALL, counts, MATMUL, links, limit=1)
    assert step.plan.experts == (0,)
    nbytes, hops, pieces = 2 * SMALL.numel, 7, 12  # 3 MiB in bf16, and at least 256 KiB per piece
    ways = [(a // links.node != b // links.node) for a, b in pairwise(range(8))]
    one = [nbytes / pieces / (links.outside if way else links.inside) + links.message for way in ways]
    # All pieces wait for the slowest link; the others pass one piece each.
    expected = sum(one) + (pieces - 1) * max(one)
    spans = passed(links, False, step)
    assert max(end for _, end in spans) - min(start for start, _ in spans) == pytest.approx(expected)
    assert len(one) == hops


@pytest.mark.parametrize(
    "ranks", [pytest.param(16, marks=pytest.mark.full), 64, pytest.param(256, marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    "links", [Links(8, 300e9, 40e9), Links(768, 140e9, 20e9)], ids=("nodes", "super node")
)
def test_the_step_without_moves_is_the_models(ranks, links):
    layer = Layer(ranks, tokens=1024)
    counts = imbalanced(layer, 2.0)
    assert imbalance_of(counts) == pytest.approx(2.0, rel=0.1)
    stock, ours = compare(layer, counts, 200e12, links, limit=12)
    assert stock.plan.experts == ()
    # The model has one link: an all-to-all of unequal ranks is a little slower or faster on two.
    assert stock.seconds == pytest.approx(stock.plan.before, rel=0.1)
    assert ours.plan.before == stock.plan.before


@pytest.mark.parametrize("device", ["nodes", "super node"])
def test_a_skewed_layer_gets_faster_about_as_predicted(device):
    links = Links(8, 315e9, 40e9) if device == "nodes" else Links(768, 137e9, 20e9)
    layer = Layer(32)
    stock, ours = compare(layer, imbalanced(layer, 2.0), 250e12, links, limit=None)
    assert len(ours.plan.experts) > 3
    assert ours.seconds < 0.75 * stock.seconds
    assert ours.seconds == pytest.approx(ours.plan.after, rel=0.1)


def test_spans_follow_their_causes():
    """Moved experts run after their weights; combine starts when the last rank is done."""
    stock, ours = compare(SMALL, imbalanced(SMALL, 2.0), MATMUL, NODES, limit=None)
    assert ours.plan.experts
    combine = {s.start for spans in ours.timeline.ranks for s in spans if s.event.kind is Kind.COMBINE}
    assert len(combine) == 2  # of forward and of backward, the same on all ranks
    for spans in ours.timeline.ranks:
        forward = {s.event.kind: s for s in spans if s.event.chunk == 0}
        backward = {s.event.kind: s for s in spans if s.event.chunk == 1}
        assert forward[Kind.DISPATCH].end == forward[Kind.COLD].start
        if Kind.HOT in forward:
            assert forward[Kind.HOT].start >= max(forward[Kind.COLD].end, forward[Kind.PASSED].end)
            assert backward[Kind.HOT].end == backward[Kind.COLD].start
        assert all(s.end <= forward[Kind.COMBINE].start for k, s in forward.items() if k is not Kind.COMBINE)
        assert all(
            s.end <= backward[Kind.DISPATCH].start for k, s in backward.items() if k is not Kind.DISPATCH
        )
    assert not any(s.event.kind in (Kind.HOT, Kind.PASSED) for spans in stock.timeline.ranks for s in spans)


def test_even_loads_move_nothing():
    stock, ours = compare(SMALL, routed(SMALL, [1] * 32), MATMUL, NODES, limit=None)
    assert ours.plan.experts == ()
    assert ours.seconds == stock.seconds


def test_rows_are_drawn_by_the_recorded_loads():
    counts = routed(SMALL, [3] * 16 + [1] * 16)
    assert counts.sum(axis=1).tolist() == [2048 * 4] * 8
    assert counts[:, :16].sum() / counts[:, 16:].sum() == pytest.approx(3, rel=0.05)
    assert np.array_equal(counts, routed(SMALL, [3] * 16 + [1] * 16))
    with pytest.raises(SettingsError, match="has 8 experts with 8 tokens, and the layer 32 experts"):
        routed(SMALL, [1] * 8)


SIZES = ["--num-experts", "32", "--moe-router-topk", "4", "--hidden-size", "1024"]
SIZES += ["--moe-ffn-hidden-size", "512", "--tokens", "2048", "--device", "a3"]


def test_the_command_draws_a_layer_with_recorded_loads(tmp_path, capsys):
    loads = {1: [10] * 32, 2: [90, 80] + [10] * 30}
    layers = [expert_load.LayerLoad(number, 0, load, [load]) for number, load in loads.items()]
    report = tmp_path / expert_load.FILE
    report.write_text(json.dumps(expert_load.record(1, layers)) + "\n")
    flags = ["--expert-model-parallel-size", "8", *SIZES, "--expert-load", str(tmp_path)]
    files = {name: str(tmp_path / f"step.{name}") for name in ("png", "perfetto", "json")}
    assert (
        schedule.run([*flags, *(part for name, file in files.items() for part in (f"--{name}", file))]) == 0
    )
    said = capsys.readouterr().out
    # Without a number, the layer that is least balanced.
    assert "moved: experts 0" in said
    stock, ours = json.loads((tmp_path / "step.json").read_text())
    assert ours["milliseconds"] < stock["milliseconds"]
    assert stock["imbalance"] > 2
    drawn = {
        event["cat"]
        for event in json.loads((tmp_path / "step.perfetto").read_text())["traceEvents"]
        if "cat" in event
    }
    assert {"dispatch", "moved experts", "moved weights and gradients", "combine"} <= drawn
    assert (tmp_path / "step.png").stat().st_size > 10_000
    schedule.run([*flags, "--layer", "1"])
    assert "moved: no expert, because none pays" in capsys.readouterr().out
    with pytest.raises(SettingsError, match="has no layer 7; it has 1, 2"):
        schedule.run([*flags, "--layer", "7"])


def test_impossible_layers_are_refused():
    with pytest.raises(SettingsError, match="256 experts cannot be spread over 24 ranks"):
        Layer(24)
    with pytest.raises(SettingsError, match="a token cannot choose 300 of 256 experts"):
        Layer(16, topk=300)
    for empty in ("hidden", "width", "tokens"):
        with pytest.raises(SettingsError, match="a layer with 0"):
            Layer(16, **{empty: 0})
    with pytest.raises(SettingsError, match="expert-num 0: give at least 1"):
        schedule.run(["--expert-model-parallel-size", "16", "--balanced-moe-hot-expert-num", "0"])
    with pytest.raises(SettingsError, match="--imbalance 900"):
        imbalanced(SMALL, 900.0)
