"""Names of algorithms: MindSpeed's, Megatron's, and a user's; each contradiction is one message."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

import mindspeed_dsa
from mindspeed_dsa.context_parallel.algorithms import (
    COMM_TYPES,
    Algorithms,
    check_context_parallel,
    register,
    registered,
    unregister,
)


def arguments(ranks=4, **given):
    return SimpleNamespace(context_parallel_size=ranks, **given)


@pytest.mark.parametrize(("mindspeeds", "megatrons"), COMM_TYPES.items())
@pytest.mark.parametrize("default", [None, ["p2p"]])
def test_both_names_say_the_same(mindspeeds, megatrons, default):
    """Megatron-LM's parser fills in p2p if no algorithm was passed."""
    ours = Algorithms.of(arguments(context_parallel_algo=mindspeeds, cp_comm_type=default))
    theirs = Algorithms.of(arguments(cp_comm_type=[megatrons]))
    assert ours == theirs == Algorithms(4, (megatrons,))


def test_a_layer_has_its_own():
    chosen = Algorithms.of(arguments(cp_comm_type=["p2p", "a2a", "all_gather"]))
    assert [chosen.of_layer(number, "p2p") for number in (1, 2, 3, 4)] == [
        "p2p",
        "a2a",
        "allgather",
        "allgather",
    ]
    assert Algorithms.of(arguments(cp_comm_type="a2a")).of_layer(7, "p2p") == "a2a"
    assert Algorithms(2).of_layer(1, "allgather") == "allgather"


def test_the_degree_is_that_of_either_flag():
    by_ours = Algorithms.of(arguments(8, context_parallel_algo="hybrid_cp_algo", ulysses_degree_in_cp=4))
    by_theirs = Algorithms.of(
        arguments(8, cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=[4, 2])
    )
    assert by_ours == by_theirs
    assert [by_ours.degree(name) for name in ("p2p", "a2a", "a2a+p2p", "allgather")] == [1, 8, 4, 1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"context_parallel_algo": "ulysses_cp_algo", "cp_comm_type": ["allgather"]},
            "ulysses_cp_algo and --cp-comm-type allgather name different algorithms; omit one",
        ),
        (
            {"context_parallel_algo": "ring"},
            "--context-parallel-algo ring is unknown; use one of",
        ),
        ({"cp_comm_type": ["p2p", "tree"]}, "--cp-comm-type tree is unknown; use p2p, a2a"),
        (
            {"ulysses_degree_in_cp": 2, "hierarchical_context_parallel_sizes": [4, 2]},
            "2 and --hierarchical-context-parallel-sizes 4 2 differ",
        ),
    ],
)
def test_contradicting_names_are_refused(given, message):
    with pytest.raises(mindspeed_dsa.SettingsError, match=message):
        Algorithms.of(arguments(8, **given))


def test_an_explicit_p2p_contradicts_too():
    with pytest.raises(mindspeed_dsa.SettingsError, match="name different algorithms"):
        mindspeed_dsa.enable(
            context_parallel_size=2, context_parallel_algo="ulysses_cp_algo", cp_comm_type=["p2p"]
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seq_length": 20}, "--seq-length 20 is not divisible .* use a multiple of 8"),
        ({"cp_comm_type": ["p2p", "a2a"], "num_layers": 3}, "has 2 names for 3 layers"),
        ({"ulysses_degree_in_cp": 2}, "belongs to hybrid_cp_algo"),
        (
            {"context_parallel_algo": "hybrid_cp_algo"},
            "one of 2 with --context-parallel-size 4, and it is",
        ),
        ({"context_parallel_algo": "hybrid_cp_algo", "ranks": 3}, "and 3 is not; use ulysses_cp_algo"),
        ({"cp_block_rows": 16, "seq_length": 64}, "64 is not divisible by 128"),
        ({"cp_block_rows": -1}, "use 0 or more"),
        ({"cp_block_rows": 8, "cp_comm_type": ["a2a"]}, "a2a needs Megatron's own rows"),
    ],
)
def test_what_no_attention_can_do_is_one_message(given, message):
    args = arguments(**given)
    (found,) = check_context_parallel(args, Algorithms.of(args))
    assert re.search(message, found), found


def test_a_registered_strategy_has_a_name_too():
    register("mine", dict)
    try:
        chosen = Algorithms.of(arguments(context_parallel_algo="mine", cp_comm_type=["p2p"]))
        assert chosen.names == ("mine",)
        assert registered("mine") is dict
        with pytest.raises(mindspeed_dsa.SettingsError, match="exists already"):
            register("mine", list)
    finally:
        unregister("mine")
    with pytest.raises(mindspeed_dsa.SettingsError, match="unknown"):
        Algorithms.of(arguments(context_parallel_algo="mine"))
