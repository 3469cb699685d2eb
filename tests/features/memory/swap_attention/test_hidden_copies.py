"""``--swap-attention auto``: the choice from measured times, and steps that swap exactly the chosen
tensors.
"""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_dsa.features.memory.swap_attention import hidden_copies
from mindspeed_dsa.features.memory.swap_attention.hidden_copies import (
    Choice,
    Clock,
    Copies,
    OfLayer,
    Times,
    hidden,
    keep_within,
)
from tests.features.memory.swap_attention.test_swap_attention import ON, assert_same_gradients, run
from tests.support.contexts import context

AUTO = {**ON, "swap_attention": "auto"}


class At:
    """Event at a time in seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def elapsed_time(self, end: At) -> float:
        """Return milliseconds, as torch's events do."""
        return 1e3 * (end._seconds - self._seconds)


def storage(saved: float, out: float, back: float, read: float) -> Times:
    return Times(1, saved, out, back, read)


def test_everything_goes_where_the_layer_lasts_longer_than_the_copies():
    assert hidden([storage(0, 1, 1, 9), storage(1, 1, 1, 8)], end=4) == 2


def test_copies_to_the_host_follow_each_other_and_end_with_the_layer():
    storages = [storage(0, 1, 0, 9), storage(0, 1, 0, 9), storage(0, 1, 0, 9)]
    assert [hidden(storages, end) for end in (0.5, 1.2, 2.3, 3.4)] == [0, 1, 2, 3]


def test_what_is_saved_late_has_less_time_to_go():
    assert hidden([storage(0, 1, 0, 9), storage(3, 1, 0, 9)], end=3.5) == 1


def test_what_is_read_first_comes_back_first():
    # The second storage is read at 1 and takes 1, too late with the margin. The first one is in time by
    # itself.
    assert hidden([storage(0, 0, 1, 4), storage(0, 0, 1, 1)], end=9) == 1
    assert hidden([storage(0, 0, 1, 4), storage(0, 0, 1, 1.2)], end=9) == 2
    assert hidden([storage(0, 0, 1, 2), storage(0, 0, 1, 1.2)], end=9) == 1


def clock(asked: float, reads: list[float], ends: list[float], above: Clock | None = None) -> Clock:
    made = Clock()
    made.asked, made.end, made.above = At(asked), At(3.0), above
    for read, end in zip(reads, ends, strict=True):
        made.saved.append(At(1.0))
        made.copies.append(Copies(8, (At(1), At(2)), (At(end - 1), At(end)), At(read)))
    return made


def test_time_that_the_device_waited_is_not_time_to_hide_in():
    above = clock(10, [12], [15])  # waits for 3 s
    below = clock(10, [30, 20], [16, 24], above)  # the second one is read first, after a wait of 4 s
    times, end = below.times() or ([], math.nan)
    assert end == 2
    assert [each.read for each in times] == [30 - 10 - 3 - 4, 20 - 10 - 3]
    assert [each.back for each in times] == [1, 1]


def test_a_storage_that_has_never_left_has_no_copy_back():
    made = clock(10, [12], [11])
    made.copies[0].back = made.copies[0].read = None
    found, _ = made.times() or ([], math.nan)
    assert found[0].back == 0
    assert found[0].read == math.inf


def test_a_forward_without_backward_says_nothing():
    made = clock(10, [12], [11])
    made.asked = None
    assert made.times() is None


def test_what_stays_fits_the_device():
    layers = [
        OfLayer("layer 1", most=2, limit=0, nbytes=[10, 10]),
        OfLayer("layer 2", most=1, limit=1, nbytes=[10, 10]),
    ]
    assert sum(layer.stays() for layer in layers) == 50
    assert keep_within(layers, 60) == 0
    assert keep_within(layers, 45) == 1
    assert [layer.limit for layer in layers] == [None, 1]
    assert keep_within(layers, 0) == 1
    assert [layer.limit for layer in layers] == [None, None]


def test_passes_that_the_bound_cut_short_decide_nothing():
    whole, cut = clock(10, [19], [11]), clock(10, [19], [11])
    cut.denied = [16]
    layer = OfLayer("layer 1", clocks=[whole, cut])
    layer.decide(asynchronous=True)
    assert layer.limit == 1
    assert layer.nbytes == [8, 16]
    layer = OfLayer("layer 2", clocks=[cut])
    layer.decide(asynchronous=True)
    assert layer.limit is None


def test_a_step_with_more_microbatches_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[int] = []
    number = 0
    choice = Choice(context("swap-attention", SimpleNamespace(measures=True, most_bytes=None)))
    monkeypatch.setattr(choice, "_decide", lambda: decided.append(number))
    for microbatches in [2, 2, 2, 2, 4, 4, 2, 4, 8, 8]:
        number += 1
        choice.begins({"num_microbatches": microbatches})
    assert decided == [3, 6, 10]


def test_storages_that_were_kept_leave_their_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choice = Choice(context("swap-attention", SimpleNamespace(measures=True, most_bytes=None)))
    rooms: list[float] = []
    monkeypatch.setattr(hidden_copies, "_room", lambda platform: 100 - choice._kept)
    monkeypatch.setattr(hidden_copies, "keep_within", lambda layers, room: rooms.append(room) or 0)
    layer, record = torch.nn.Identity(), OfLayer("layer 1", most=2)
    choice._layers[layer] = record
    for _ in range(2):
        record.clocks = [clock(10, [12], [11])]
        choice._decide()
    assert choice._kept == 2 * 8
    assert rooms == [100, 100]


def steps(pool: Any, switches: dict[str, Any], **arguments: Any) -> list[dict[str, Any]]:
    (found,) = run(pool, "steps", switches=switches, count=4, **arguments)
    return found


@pytest.fixture(scope="module")
def without(pool: Any) -> list[dict[str, Any]]:
    return steps(pool, {})


def test_steps_after_the_second_swap_what_is_hidden(pool, without):
    everything, auto = steps(pool, ON), steps(pool, AUTO)
    for plain, swapped in zip(without, auto, strict=True):
        assert_same_gradients(plain["gradients"], swapped["gradients"])
    assert [step["out"] for step in auto[:2]] == [step["out"] for step in everything[:2]]
    # Each event is a tick, so the last copies of a layer end after the layer.
    assert 0 < auto[2]["out"] < auto[1]["out"]
    assert auto[3]["out"] == auto[2]["out"]
    assert 0 < auto[3]["most"] < everything[3]["most"]


def test_nothing_is_hidden_where_copies_take_the_computations_time(pool, without):
    auto = steps(pool, AUTO, asynchronous=False)
    assert [step["out"] > 0 for step in auto] == [True, True, False, False]
    assert_same_gradients(without[3]["gradients"], auto[3]["gradients"])


def test_the_log_says_why_nothing_is_swapped(pool):
    """The log names both reasons: storages that are too small, and storages whose copies step 2 did not
    hide.
    """
    auto = steps(pool, {**AUTO, "swap_attention_min_bytes": 2048}, asynchronous=False)
    assert [step["out"] > 0 for step in auto] == [True, True, False, False]
    (line,) = auto[3]["said"]
    assert re.search(r"0 of \d+ MiB .* in 0 of \d layers, because copies on cpu are waited for", line)


def test_everything_is_swapped_where_the_device_has_no_room(pool):
    auto = steps(pool, AUTO, asynchronous=False, room=0.0)
    assert auto[3]["out"] == auto[1]["out"] > 0


@pytest.mark.full
def test_what_the_bound_left_unmeasured_is_not_swapped_without_limit(pool, without):
    everything = steps(pool, ON)
    bounded = steps(pool, {**AUTO, "swap_attention_bytes": everything[0]["most"] // 2}, asynchronous=False)
    assert [step["out"] > 0 for step in bounded] == [True, True, False, False]
    assert_same_gradients(without[3]["gradients"], bounded[3]["gradients"])


def test_no_more_bytes_are_on_the_host_than_are_allowed(pool, without):
    everything = steps(pool, ON)
    allowed = everything[0]["most"] // 2
    bounded = steps(pool, {**ON, "swap_attention_bytes": allowed})
    for plain, swapped in zip(without, bounded, strict=True):
        assert_same_gradients(plain["gradients"], swapped["gradients"])
        assert 0 < swapped["most"] <= allowed
