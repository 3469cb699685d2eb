"""``destroy_model_parallel`` ends Megatron's process groups and gloo's threads."""

from __future__ import annotations

import pytest

from tests.support import third_party

third_party.or_skip("megatron.core")

CASES = "tests.features.platform.cpu.group_cases"
THREADS_OF_A_GROUP = 3
ROUNDS = 4


@pytest.mark.full
def test_threads_stay_the_same_over_ten_rounds(pool):
    for left in pool.run(f"{CASES}:rounds", 2, enabled=True, count=10):
        assert {groups for _, groups in left} == {1}, "the world alone"
        assert len({threads for threads, _ in left}) == 1, left


def test_threads_grow_without_the_platform(pool):
    """Without the platform, threads grow; otherwise the test above would prove nothing."""
    for left in pool.run(f"{CASES}:rounds", 2, enabled=False, count=ROUNDS):
        threads, groups = zip(*left, strict=True)
        assert groups[-1] > groups[0] > 1
        assert threads[-1] - threads[0] >= (ROUNDS - 1) * THREADS_OF_A_GROUP


def test_groups_with_options_of_nccl_are_gloos(pool):
    """``--use-torch-fsdp2`` requests NCCL options, but a torch without NCCL has no class for them."""
    assert pool.run(f"{CASES}:with_a_stream_of_high_priority", 2) == [("gloo", 2.0)] * 2


@pytest.mark.full
def test_a_release_that_keeps_no_list_of_its_groups(pool):
    for left in pool.run(f"{CASES}:without_a_list", 2):
        assert {groups for _, groups in left} == {1}
        assert len({threads for threads, _ in left}) == 1, left


def test_groups_of_another_megatron_survive(pool):
    assert pool.run(f"{CASES}:of_two_megatrons", 2) == [(2.0, [False, True])] * 2


def test_nobody_comes_back_while_others_still_connect(pool):
    """No rank returns early, because a rank that destroyed its groups at once would disconnect the others."""
    times = pool.run(f"{CASES}:set_up_at_different_times", 2)
    assert min(back for _, back in times) >= max(made for made, _ in times)


def test_groups_in_lists_and_dictionaries_are_let_go(pool):
    for first, second in pool.run(f"{CASES}:nested", 2):
        assert first[1:] == (1, [], {})
        assert first == second


def test_groups_of_the_caller_survive(pool):
    for found in pool.run(f"{CASES}:what_is_not_megatrons", 2):
        assert found == [3.0, 3.0, 3.0, True]


@pytest.mark.full
@pytest.mark.parametrize("world", [False, True])
def test_what_is_destroyed_already_does_no_harm(pool, tmp_path, world):
    stores = [str(tmp_path / f"store-{number}") for number in range(2 * world)]
    for first, second in pool.run(f"{CASES}:destroyed_before", 2, stores=stores):
        assert first[1:] == (0 if world else 1, [])
        assert first == second
