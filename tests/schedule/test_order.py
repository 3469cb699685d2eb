"""Lists of events equal Megatron's own orders, and layouts that Megatron refuses are refused."""

from __future__ import annotations

import pytest

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.schedule import lists
from mindspeed_dsa.schedule.events import Event, Kind, Schedule
from mindspeed_dsa.schedule.megatron_order import schedule
from mindspeed_dsa.schedule.simulate import check_lists

MEGATRON = Megatron()

PP4_V2_M8 = [
    # warmup, pairs, cooldown, first pair, last pair, in flight; without and with the extra warmup
    [(10, 6, 10, "F0.6 B1.0", "F1.7 B0.1", 11), (11, 5, 11, "F0.7 B1.0", "F1.7 B0.0", 12)],
    [(8, 8, 8, "F0.4 B1.0", "F1.7 B0.3", 9), (9, 7, 9, "F0.5 B1.0", "F1.7 B0.2", 10)],
    [(6, 10, 6, "F1.2 B1.0", "F1.7 B1.5", 7), (7, 9, 7, "F1.3 B1.0", "F1.7 B1.4", 8)],
    [(4, 12, 4, "F1.0 B1.0", "F1.7 B1.7", 5), (5, 11, 5, "F1.1 B1.0", "F1.7 B1.6", 6)],
]


@pytest.mark.parametrize("extra", [0, 1])
def test_four_ranks_two_chunks_eight_microbatches(extra):
    made = schedule(MEGATRON, 4, 2, 8, paired=True, extra_warmup=bool(extra))
    for events, expected in zip(made.ranks, PP4_V2_M8, strict=True):
        kinds = [event.kind for event in events]
        warmup = kinds.index(Kind.BACKWARD) - 1
        pairs = [block for block in made.blocks(made.ranks.index(events)) if len(block) == 2]
        open_now = [
            kinds[: i + 1].count(Kind.FORWARD) - kinds[: i + 1].count(Kind.BACKWARD) for i in range(32)
        ]
        assert (
            warmup,
            len(pairs),
            len(events) - warmup - 2 * len(pairs),
            " ".join(map(str, pairs[0])),
            " ".join(map(str, pairs[-1])),
            max(open_now),
        ) == expected[extra]


def test_dependent_pairs_are_all_on_the_last_rank():
    """Without the extra warmup, the backward of such a pair belongs to its own forward."""

    def dependent(extra):
        made = schedule(MEGATRON, 4, 2, 8, paired=True, extra_warmup=extra)
        return [
            sum(
                len(block) == 2
                and (block[0].chunk, block[0].microbatch) == (block[1].chunk, block[1].microbatch)
                for block in made.blocks(rank)
            )
            for rank in range(4)
        ]

    assert dependent(False) == [0, 0, 0, 8]
    assert dependent(True) == [0, 0, 0, 0]


def test_one_rank_has_one_forward_ahead():
    plain = schedule(MEGATRON, 1, 1, 3)
    ahead = schedule(MEGATRON, 1, 1, 3, paired=True, extra_warmup=True)
    assert " ".join(map(str, plain.ranks[0])) == "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2"
    assert " ".join(map(str, ahead.ranks[0])) == "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2"
    assert [event.pair for event in ahead.ranks[0]] == [None, 0, 0, 1, 1, None]


def test_evaluation_is_forwards_only():
    made = schedule(MEGATRON, 2, 2, 4, forward_only=True)
    check_lists(made)
    assert {event.kind for events in made.ranks for event in events} == {Kind.FORWARD}


def test_all_microbatches_in_warmup():
    made = schedule(MEGATRON, 4, 2, 4, paired=True, extra_warmup=True)
    assert [event.kind for event in made.ranks[0]] == [Kind.FORWARD] * 8 + [Kind.BACKWARD] * 8


@pytest.mark.parametrize(
    ("microbatches", "group", "words"),
    [(60, None, "48 or 64"), (3, None, "PP|pipeline ranks"), (64, 8, "group size")],
)
def test_what_megatron_refuses(microbatches, group, words):
    with pytest.raises(SettingsError, match=words):
        schedule(MEGATRON, 16, 2, microbatches, group)


def test_sixty_microbatches_in_groups_of_twenty():
    check_lists(schedule(MEGATRON, 16, 2, 60, 20))


@pytest.mark.parametrize("made", [lists.zero_bubble(4, 9), lists.zero_bubble(4, 2), lists.dual_pipe_v(4, 9)])
def test_listed_schedules_are_complete(made):
    check_lists(made)
    for events in made.ranks:
        seen = set()
        for event in events:
            if event.kind is Kind.WEIGHT:
                assert (event.chunk, event.microbatch) in seen
            elif event.kind is Kind.BACKWARD:
                seen.add((event.chunk, event.microbatch))


def test_dual_pipe_v_needs_microbatches():
    with pytest.raises(SettingsError, match="at least 8"):
        lists.dual_pipe_v(4, 7)


def _swapped(events, first, second):
    events = list(events)
    events[first], events[second] = events[second], events[first]
    return tuple(events)


def test_messages_in_another_order_than_expected():
    made = schedule(MEGATRON, 2, 1, 4)
    wrong = Schedule("mine", (_swapped(made.ranks[0], 0, 1), made.ranks[1]), 1, 4)
    with pytest.raises(SettingsError, match="rank 0 sends rank 1 its messages in another order"):
        check_lists(wrong)


def test_a_unit_that_is_missing():
    made = schedule(MEGATRON, 2, 1, 4)
    twice = (*made.ranks[0][:-1], Event(Kind.BACKWARD, 0, 0))
    with pytest.raises(SettingsError, match="rank 0 does not run every chunk"):
        check_lists(Schedule("mine", (twice, made.ranks[1]), 1, 4))
