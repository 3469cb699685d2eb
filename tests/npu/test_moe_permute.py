"""The NPU backend of the permutation of tokens by expert, through torch_npu's own operators."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops.backend import BackendUnavailable
from mindspeed_dsa.ops.moe_permute import permute, unpermute
from tests.npu.kernel_parts import Call
from tests.ops import permutation_cases as cases

PERMUTE = "npu_moe_token_permute_with_routing_map"
FINALIZE = "npu_moe_finalize_routing"
EVEN = [case for case in cases.ROUTINGS if case[2].startswith("top") and case[0]]


@pytest.mark.parametrize("routing", EVEN, ids=[f"{kind} of {experts}" for _, experts, kind in EVEN])
@pytest.mark.parametrize(
    ("dtype", "probs"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, None),
    ],
)
def test_there_and_back(npu_kernels, routing, dtype, probs):
    cases.check("npu", routing, dtype, probs, added=True)
    tokens = (routing[0],)
    once = [Call(PERMUTE, "", tokens), Call(FINALIZE, "skip1", tokens), Call(f"{PERMUTE}_grad", "", tokens)]
    assert npu_kernels == 2 * once  # the check runs twice


def test_chunks_in_another_order(npu_kernels):
    cases.check_chunks("npu", torch.float32)


def test_uneven_routings_go_to_the_reference(npu_kernels, caplog):
    """What the manuals exclude reaches no operator, and what one backend permutes another puts back."""
    chosen = cases.routing_of(19, 5, "ragged")
    tokens = torch.randn(19, 8)
    rows = int(chosen.sum())
    with pytest.raises(BackendUnavailable, match="every token to go to equally many experts"):
        permute(tokens, chosen, rows=rows, backend="npu")
    from mindspeed_dsa.ops import backend

    before = dict(backend._PREFERENCE)
    backend._PREFERENCE["cpu"] = before["npu"]
    try:
        moved = permute(tokens, chosen, rows=rows)
        back = unpermute(moved.tokens, moved.row_map, 19)
        even = cases.routing_of(13, 4, "top 2")
        probs = torch.rand(13, 4)
        moved = permute(tokens[:13], even, rows=26, topk=2)
        weighted = unpermute(moved.tokens, moved.row_map, 13, probs)
    finally:
        backend._PREFERENCE.update(before)
    assert torch.allclose(back, tokens * chosen.sum(1)[:, None])
    assert torch.allclose(weighted, tokens[:13] * (probs * even).sum(1)[:, None], atol=1e-6)
    assert [call.name for call in npu_kernels] == [PERMUTE]
    assert "'npu' is skipped for 'reference'" in caplog.text
