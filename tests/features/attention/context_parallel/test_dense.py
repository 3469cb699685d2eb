"""Ring attention, head exchange and both have the outputs and gradients of attention in one piece."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.features.attention.context_parallel.dense import Part, parts_of_positions

CASES = "tests.features.attention.context_parallel.dense_cases"
TOLERANCES = {"float64": 1e-13, "float32": 5e-6, "bfloat16": 2e-2}
QUICK = (
    (2, {"algorithm": "p2p", "kv_heads": 2}),
    (3, {"algorithm": "p2p", "latent": True}),
    (4, {"algorithm": "p2p", "kv_heads": 1, "dtype": "float32"}),
    (4, {"algorithm": "a2a", "kv_heads": 2}),  # fewer key heads than ranks
    (2, {"algorithm": "a2a", "latent": True, "dtype": "float32"}),
    (4, {"algorithm": "a2a+p2p", "kv_heads": 4}),
    (4, {"algorithm": "a2a+p2p", "latent": True}),
    (2, {"algorithm": "p2p", "latent": True, "dtype": "bfloat16"}),
    (4, {"algorithm": "p2p", "kv_heads": 2, "packed": "cut"}),
    (3, {"algorithm": "p2p", "latent": True, "packed": "dealt"}),
    (2, {"algorithm": "a2a", "kv_heads": 1, "packed": "dealt"}),
    (4, {"algorithm": "a2a+p2p", "latent": True, "packed": "dealt"}),
)


@pytest.mark.parametrize(("ranks", "given"), QUICK, ids=str)
def test_equal_to_one_piece(pool, ranks, given):
    tolerance = TOLERANCES[given.get("dtype", "float64")]
    for errors in pool.run(f"{CASES}:compared", ranks, length=48, **given):
        assert errors.keys() >= {"out", "query"}
        assert max(errors.values()) <= tolerance, errors


def test_every_transfer_is_behind_attention(pool):
    """Each transfer starts before an attention call and is awaited after it. Tag 1: keys, tag 2: their
    gradients.
    """
    for events in pool.run(f"{CASES}:events_of_ring", 3):
        step = ["send 1", "attend", "wait 1"]
        assert events["forward"] == [*step, *step, "attend"]
        assert events["backward"] == [
            *("send 1", "attend", "attend", "wait 1"),
            *("send 1", "attend", "send 2", "wait 1"),
            *("attend", "wait 2", "send 2"),
            *("attend", "wait 2"),
        ]


def test_parts_of_positions():
    positions = torch.tensor([4, 5, 6, 7, 12, 13])
    assert list(parts_of_positions(positions)) == [
        Part(slice(0, 4), slice(0, 4), False),
        Part(slice(0, 4), slice(4, 8), True),
        Part(slice(4, 6), slice(0, 12), False),
        Part(slice(4, 6), slice(12, 14), True),
    ]
    assert list(parts_of_positions(torch.arange(3))) == [Part(slice(0, 3), slice(0, 3), True)]
