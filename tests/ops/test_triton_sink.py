"""Sinks with the Triton kernels, which have none: output and log-sum-exp are replaced after the forward."""

from __future__ import annotations

import pytest
import torch

from tests.ops.test_sink import check, check_losses
from tests.ops.triton_backend import DEVICE


@pytest.mark.parametrize(("dtype", "deterministic"), [(torch.float32, True), (torch.bfloat16, False)])
@pytest.mark.parametrize(
    "sizes", [(5, 40, 32), (4, 160, 128), (2, 32, 32)], ids=["odd", "latent 128", "no rope"]
)
def test_equals_a_softmax_with_one_more_column(sizes, dtype, deterministic):
    torch.use_deterministic_algorithms(deterministic)
    check("triton", dtype, (60, *sizes, 9), DEVICE)


def test_the_losses_compare_with_the_shares_of_keys():
    check_losses("triton", DEVICE)
