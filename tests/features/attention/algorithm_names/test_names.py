"""Arguments get Megatron's names, and each layer its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import mindspeed_dsa

CASES = "tests.features.attention.algorithm_names.cases"


@pytest.mark.parametrize(
    ("given", "comm_type", "sizes"),
    [
        ({"context_parallel_algo": "ulysses_cp_algo"}, ["a2a"], None),
        ({"context_parallel_algo": "hybrid_cp_algo", "ulysses_degree_in_cp": 2}, ["a2a+p2p"], [2, 2]),
    ],
)
def test_megatron_finds_its_own_names(given, comm_type, sizes):
    args = SimpleNamespace(
        context_parallel_size=4, cp_comm_type=["p2p"], hierarchical_context_parallel_sizes=None, **given
    )
    with mindspeed_dsa.enabled(context_parallel_size=4, **given):
        mindspeed_dsa.validate(args)
    assert args.cp_comm_type == comm_type
    assert args.hierarchical_context_parallel_sizes == sizes


def test_everything_wrong_is_one_error():
    args = SimpleNamespace(context_parallel_size=4, seq_length=30, ulysses_degree_in_cp=2)
    with (
        mindspeed_dsa.enabled(context_parallel_size=4, ulysses_degree_in_cp=2),
        pytest.raises(mindspeed_dsa.SettingsError) as refusal,
    ):
        mindspeed_dsa.validate(args)
    assert "multiple of 8" in str(refusal.value)
    assert "belongs to hybrid_cp_algo" in str(refusal.value)


def test_every_layer_gets_its_own_name(pool):
    names = ["p2p", "a2a", "allgather"]
    arguments = {"names": names, "experimental_attention_variant": "none"}
    (told,) = pool.run(f"{CASES}:names_of_layers", 1, context_parallel_size=2, **arguments)
    assert told == names
    error = pool.run("tests.support.model:error_of", 1, case=f"{CASES}:names_of_layers", **arguments)[0]
    assert "IndexError" in error, "Megatron's own reading"
