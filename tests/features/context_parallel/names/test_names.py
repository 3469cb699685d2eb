"""Arguments get Megatron's names, and each layer its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import mindspeed_dsa


@pytest.mark.parametrize(
    ("given", "comm_type", "sizes"),
    [
        ({"context_parallel_algo": "kvallgather_cp_algo"}, ["allgather"], None),
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
