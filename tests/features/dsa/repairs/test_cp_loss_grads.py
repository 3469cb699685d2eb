"""Loss gradients of kernel backends; ``tests/matrix`` trains with Megatron's own path."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindspeed_dsa.features.dsa.repairs.loss import share_of_kernels


@pytest.mark.parametrize(
    ("backend", "ranks", "per_token", "divisor"),
    [
        ("tilelang", 4, False, 4),
        ("tilelang", 4, True, 1),
        ("tilelang", 1, False, 1),
        ("mindspeed", 4, False, 1),  # already returns the gradient of one rank's share
    ],
)
def test_a_kernels_loss_keeps_its_value_and_loses_the_factor(backend, ranks, per_token, divisor):
    loss = torch.tensor(3.0, requires_grad=True)
    output = torch.ones(2)

    def run_fused(**kwargs):
        return output, loss * 2

    groups = SimpleNamespace(cp=SimpleNamespace(size=lambda: ranks))
    got, shared = share_of_kernels(run_fused)(
        config=SimpleNamespace(dsa_kernel_backend=backend),
        calculate_per_token_loss=per_token,
        pg_collection=groups,
    )
    shared.backward()
    assert got is output
    assert (float(shared), float(loss.grad)) == (6.0, 2.0 / divisor)


def test_a_backend_that_declines_is_left_alone():
    config = SimpleNamespace(dsa_kernel_backend="cudnn")
    groups = SimpleNamespace(cp=SimpleNamespace(size=lambda: 2))
    assert share_of_kernels(lambda *a, **k: None)(config, pg_collection=groups) is None
    selection = share_of_kernels(lambda *a, **k: (1, None, None))(config, pg_collection=groups)
    assert selection == (1, None, None)
