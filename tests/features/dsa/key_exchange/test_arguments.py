"""Arguments of a DSA job under context parallelism."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import mindspeed_dsa

ALGORITHM = "kvallgather_cp_algo"
ON = {"experimental_attention_variant": "dsa", "use_fused_dsa": True, "context_parallel_size": 2}


def arguments(**given):
    plain = {"cp_comm_type": ["p2p"], "num_layers": 2, "seq_length": 32, "megatron_root": "megatron"}
    sizes = {"dsa_indexer_n_heads": 4, "dsa_indexer_head_dim": 16, "dsa_indexer_topk": 8}
    return SimpleNamespace(**{**ON, **plain, **sizes, **given})


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"cp_comm_type": None},
        {"cp_comm_type": ["allgather"]},
        {"context_parallel_algo": "kvallgather_cp_algo"},
    ],
)
def test_megatrons_default_is_replaced(given):
    args = arguments(**given)
    switches = {name: value for name, value in given.items() if name == "context_parallel_algo"}
    with mindspeed_dsa.enabled(**ON, **switches):
        mindspeed_dsa.validate(args)
    assert args.cp_comm_type == ["allgather"]


@pytest.mark.parametrize(
    "named",
    [{"cp_comm_type": ["p2p"]}, {"context_parallel_algo": "ulysses_cp_algo"}, {"cp_comm_type": ["a2a"]}],
)
def test_another_algorithm_is_refused(named):
    with pytest.raises(mindspeed_dsa.SettingsError, match="DSA's attention gathers keys"):
        mindspeed_dsa.enable(**ON, **named)


@pytest.mark.parametrize(
    ("switches", "given", "message"),
    [
        ({"use_dsa_absorb": False}, {}, "add --use-dsa-absorb"),
        ({"use_fused_lightning_indexer": False}, {}, "omit --no-use-fused-"),
        ({}, {"seq_length": 30}, "use a multiple of 4"),
        ({"cp_block_rows": 5}, {}, "two blocks for each of 2 ranks"),
    ],
)
def test_what_cannot_be_trained_is_one_message(switches, given, message):
    with (
        mindspeed_dsa.enabled(**ON, **switches),
        pytest.raises(mindspeed_dsa.SettingsError, match=message) as refusal,
    ):
        mindspeed_dsa.validate(arguments(**given))
    assert str(refusal.value).count("\n") == 1


def test_blocks_of_rows_are_for_sparse_attention():
    on = {"context_parallel_size": 2, "cp_block_rows": 4}
    args = arguments(experimental_attention_variant=None, cp_comm_type=["allgather"])
    with (
        mindspeed_dsa.enabled(**on),
        pytest.raises(mindspeed_dsa.SettingsError, match="--cp-block-rows balances sparse attention"),
    ):
        mindspeed_dsa.validate(args)
