from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindspeed_dsa.features.dsa.repairs.feature import FEATURE

CASES = "tests.features.dsa.parts_of_dsa"
ERROR = "tests.support.model:error_of"


def natural_order(size: int) -> torch.Tensor:
    """Return ``H[i, j] = (-1) ** popcount(i & j)``, orthonormal, in fp64."""
    signs = [[(-1.0) ** bin(row & column).count("1") for column in range(size)] for row in range(size)]
    return torch.tensor(signs, dtype=torch.float64) * size**-0.5


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, 1e-14),
        (torch.float32, 1e-6),
        (torch.float16, 2**-10),
        (torch.bfloat16, 2**-8),
    ],
)
def test_every_float_type(pool, dtype, tolerance):
    activation = torch.randn(7, 2, 3, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    (rotated,) = pool.run(f"{CASES}:rotate", 1, activation=activation)
    assert rotated.dtype == dtype
    expected = activation.double() @ natural_order(128)
    torch.testing.assert_close(rotated.double(), expected, rtol=tolerance, atol=tolerance)


def test_bfloat16_is_rounded_once(pool):
    activation = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    (rotated,) = pool.run(f"{CASES}:rotate", 1, activation=activation)
    exact = (activation.double() @ natural_order(128)).bfloat16()
    # An fp32 sum crosses a rounding boundary now and then. Rounding twice would do so often.
    assert (rotated != exact).float().mean() < 1e-3


def test_it_is_its_own_inverse(pool):
    activation = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    (once,) = pool.run(f"{CASES}:rotate", 1, activation=activation)
    (twice,) = pool.run(f"{CASES}:rotate", 1, activation=once)
    torch.testing.assert_close(twice, activation, rtol=1e-5, atol=1e-5)


def test_gradients(pool):
    assert pool.run(f"{CASES}:rotation_gradcheck", 1) == [True]


def test_training_after_evaluation_under_inference_mode(pool):
    (gradient,) = pool.run(f"{CASES}:rotate_for_evaluation_first", 1)
    expected = natural_order(256).sum(0).float().expand(2, -1)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_the_repair_megatron_refuses(pool, dtype):
    activation = torch.ones(2, 16, dtype=dtype)
    (error,) = pool.run(
        ERROR, 1, case=f"{CASES}:rotate", activation=activation, switches={"no_dsa_repairs": "hadamard"}
    )
    wanted = "not installed" if dtype == torch.bfloat16 else "only support bf16"
    assert wanted in error


def test_a_size_that_is_no_power_of_two(pool):
    (error,) = pool.run(ERROR, 1, case=f"{CASES}:rotate", activation=torch.ones(2, 48))
    assert "power of two" in error
    assert "dsa_indexer_head_dim" in error
    (problem,) = FEATURE.problems(SimpleNamespace(dsa_indexer_head_dim=48))
    assert "--dsa-indexer-head-dim 48" in problem
    assert not FEATURE.problems(SimpleNamespace(dsa_indexer_head_dim=128))
