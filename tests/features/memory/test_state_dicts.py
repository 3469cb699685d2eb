"""State dicts during training equal stock's, key by key and bit by bit, and can be exchanged."""

from __future__ import annotations

import pytest

from tests.features.memory.failure_cases import leaves_of
from tests.support.optimizer_training import DISTRIBUTED, OFF, PLAIN, assert_same_training

CASES = "tests.features.memory.failure_cases"
REUSE = {"reuse_fp32_param": True}
SWAP = {"swap_optimizer": True}
VIRTUAL = {"virtual_optimizer": ["all"]}
FLOAT32 = {"precision": "fp32"}
OPTIMIZERS = [
    pytest.param(
        PLAIN, (REUSE, SWAP, VIRTUAL), id="Float16OptimizerWithFloat16Params", marks=pytest.mark.full
    ),
    pytest.param(FLOAT32, (SWAP, VIRTUAL), id="FP32Optimizer", marks=pytest.mark.full),
    pytest.param(DISTRIBUTED, (REUSE, SWAP, VIRTUAL), id="DistributedOptimizer"),
]
SEEN = ("leaves", "records", "weights", "masters", "moments")


def run(pool, **arguments):
    (found,) = pool.run(f"{CASES}:state_dicts", 1, **arguments)
    return found


def assert_same(found, expected):
    for moment, leaves in expected["leaves"].items():
        for leaf, stocks in zip(found["leaves"][moment], leaves, strict=True):
            assert leaf == stocks, moment
    for what in SEEN:
        assert found[what] == expected[what], what


@pytest.mark.parametrize(("options", "features"), OPTIMIZERS)
def test_state_dicts_are_stocks_and_load_into_each_other(pool, options, features):
    stock = run(pool, switches=OFF, **options)
    resumed = run(pool, switches=OFF, loaded=stock["saved"], **options)
    assert resumed["leaves"] != stock["leaves"]
    for switches in features:
        having = run(pool, switches=switches, **options)
        assert_same(having, stock)
        assert_same(run(pool, switches=switches, loaded=stock["saved"], **options), resumed)
        # The state that stock loaded above.
        assert list(leaves_of(having["saved"])) == list(leaves_of(stock["saved"]))


@pytest.mark.full
@pytest.mark.parametrize(("options", "features"), OPTIMIZERS)
def test_parameters_without_elements(pool, options, features):
    stock = run(pool, switches=OFF, empty=True, **options)
    # With sharding, Megatron's optimizer gets no parameter without elements.
    assert ((0, 8) in shapes(stock)) == (options is not DISTRIBUTED)
    for switches in features:
        having = run(pool, switches=switches, empty=True, **options)
        assert_same(having, stock)
        assert len(having["moments"]) == 2 * len(having["masters"])
        assert_same_training(pool, 1, switches, steps=3, clip=0.5, empty=True, **options)


def shapes(found):
    leaves = found["leaves"].get("between steps, inner", found["leaves"]["between steps"])
    return [leaf[2][2] for leaf in leaves if len(leaf) == 4]
