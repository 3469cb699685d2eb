"""Every memory feature with FSDP2 is bit-identical to FSDP2 without it, or is refused."""

from __future__ import annotations

import pytest

from tests.features.memory.pairs import FEATURES, reason
from tests.support.memory_events import EVENTS

CASES = "tests.features.data_parallel.fsdp2.memory_cases"
REFUSED = {"reuse-fp32-param": "fsdp2 cannot be combined with reuse-fp32-param: weights are gathered"}
STATE = {"swap-optimizer": 0, "virtual-optimizer": 4}
"""Bytes of master weights and moments per element on the device; 12 without a feature."""


def same_bits(pool, ranks, names):
    """Check that a run with these features is bit-identical to a run without any."""
    for alone, rank in zip(pool.baseline(f"{CASES}:train", 2, switches={}), ranks, strict=True):
        for what in ("records", "weights", "masters", "moments"):
            assert rank[what] == alone[what], what
        assert all(record["successful"] for record in rank["records"])
        for name, event in EVENTS.items():
            assert (event in rank["counts"]) == (name in names), event
            assert event not in alone["counts"]
        assert alone["bytes of state"] == 12
        assert rank["bytes of state"] == pytest.approx(min(STATE.get(name, 12) for name in names), abs=0.01)
        if "swap-attention" in names:
            assert rank["counts"]["gathered weights moved"] == 0
            # One of two layers has a layer below it, in each of two microbatches.
            assert rank["counts"]["layers below found"] == 2 * len(rank["records"])


TOGETHER = sorted(set(FEATURES) - set(REFUSED) - {"virtual-optimizer"})


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in REFUSED else pytest.mark.full) for name in sorted(FEATURES)],
)
def test_a_memory_feature_leaves_the_bits_or_is_refused(pool, name):
    ranks = pool.run(f"{CASES}:train", 2, switches=FEATURES[name])
    if name in REFUSED:
        assert all(reason(rank["refused"]).startswith(REFUSED[name]) for rank in ranks)
    else:
        same_bits(pool, ranks, [name])


def test_most_of_them_together_and_with_megatrons_own_recomputation(pool):
    switches = {key: value for name in TOGETHER for key, value in FEATURES[name].items()}
    modules = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mla_up_proj", "moe"]}
    verified = {**switches, "recompute_verify": True}
    same_bits(pool, pool.run(f"{CASES}:train", 2, switches=verified, overrides=modules), TOGETHER)


@pytest.mark.full
def test_weights_stay_that_attention_gathers_for_itself(pool, tmp_path):
    # Units inside of a layer gather while the layer runs, and their weights are saved as views.
    config = tmp_path / "fsdp2.yaml"
    layers = "megatron.core.tensor_parallel.layers"
    config.write_text(f"sub_modules_to_wrap: [{layers}.ColumnParallelLinear, {layers}.RowParallelLinear]")
    units = {"fsdp2_config_path": str(config), "use_fused_dsa": True}
    (alone, _) = pool.run(f"{CASES}:train", 2, switches=units)
    (rank, _) = pool.run(f"{CASES}:train", 2, switches={**units, **FEATURES["swap-attention"]})
    assert rank["records"] == alone["records"]
    assert rank["moments"] == alone["moments"]
    assert rank["counts"][EVENTS["swap-attention"]] > 0
    assert rank["counts"]["gathered weights moved"] == 0
