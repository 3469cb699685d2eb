"""The Triton permutation of tokens by expert, against matrices in fp64."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops import checks
from mindspeed_dsa.ops.moe_permute import permute, unpermute
from tests.ops import permutation_cases as cases
from tests.ops.triton_backend import DEVICE

FEW = [case for case in cases.ROUTINGS if case[1] != 512]


@pytest.mark.parametrize("routing", FEW, ids=[f"{kind} of {experts}" for _, experts, kind in FEW])
def test_there_and_back(routing):
    cases.check("triton", routing, torch.float32, torch.float32, device=DEVICE, added=routing[0] % 2 == 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype):
    cases.check("triton", (19, 5, "ragged"), dtype, torch.float32, device=DEVICE, added=True)
    cases.check("triton", (19, 5, "ragged"), dtype, torch.float32, device=DEVICE, weighted=True)


def test_many_experts_and_wide_tokens(monkeypatch):
    # Several blocks of experts and of columns, the last of them partial.
    monkeypatch.setattr("mindspeed_dsa.ops.moe_permute.triton._MAX_BLOCK", 16)
    cases.check("triton", (3, 600, "top 8"), torch.float32, None, device=DEVICE)
    cases.check("triton", (5, 3, "top 2"), torch.float32, torch.float32, hidden=40, device=DEVICE)
    cases.check(
        "triton", (5, 3, "top 2"), torch.float32, torch.float32, hidden=40, device=DEVICE, weighted=True
    )


def test_chunks_in_another_order():
    cases.check_chunks("triton", torch.float32, DEVICE)


@pytest.mark.parametrize("claimed", [20, 32])
def test_a_wrong_number_of_rows_stays_within_memory(claimed):
    # There are 26 rows. With fewer, the last rows are dropped; with more, the rest is zero. The host never
    # waits to find out.
    checks.set_debug_checks(False)
    routing_map = cases.routing_of(13, 4, "top 2").to(DEVICE)
    tokens = torch.randn(13, 8).to(DEVICE).requires_grad_()
    moved = permute(tokens, routing_map, rows=claimed, backend="triton")
    whole = permute(tokens, routing_map, rows=26, backend="triton")
    same = min(claimed, 26)
    assert moved.tokens.shape == (claimed, 8)
    assert torch.equal(moved.tokens[:same], whole.tokens[:same])
    assert not moved.tokens[26:].any()
    back = unpermute(moved.tokens, moved.row_map, 13, backend="triton")
    (grad,) = torch.autograd.grad(back.sum(), tokens)
    assert torch.isfinite(back).all()
    if claimed > 26:
        assert torch.equal(back.cpu(), 2 * tokens.detach().cpu())
        assert torch.equal(grad.cpu(), torch.full((13, 8), 2.0))
