"""The NPU backend of the permutation of tokens by expert, through torch_npu's own operators."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops.backend import BackendUnavailable
from mindspeed_dsa.ops.moe_permute import backends, permute, sort_chunks, unpermute
from mindspeed_dsa.ops.moe_permute.row_map import of_counted_routing
from tests.npu.counting import counted
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


@pytest.mark.parametrize("routing", EVEN, ids=[f"{kind} of {experts}" for _, experts, kind in EVEN])
@pytest.mark.parametrize(
    ("dtype", "probs"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
)
def test_there_and_weighted_back(npu_kernels, routing, dtype, probs):
    cases.check("npu", routing, dtype, probs, weighted=True, added=True)
    tokens = (routing[0],)
    once = [Call(PERMUTE, "", tokens), Call(FINALIZE, "skip1", tokens), Call(f"{PERMUTE}_grad", "", tokens)]
    assert npu_kernels == 2 * once


def test_gradients_of_weights_in_blocks_are_the_same(npu_kernels, monkeypatch):
    """Wide copies of rows are bounded: no copy is larger than a block."""
    chosen = cases.routing_of(13, 4, "top 2")
    leaves = [torch.randn(26, 16).bfloat16().requires_grad_(), torch.rand(13, 4).requires_grad_()]
    row_map = permute(torch.randn(13, 16).bfloat16(), chosen, rows=26, topk=2, backend="npu").row_map

    def gradients():
        total = unpermute(leaves[0], row_map, 13, leaves[1], backend="npu").float().square().sum()
        return torch.autograd.grad(total, leaves)

    whole = gradients()
    monkeypatch.setattr(backends, "_NPU_BLOCK_BYTES", 5 * 16 * 4)
    with counted(smallest_copy=1) as counts:
        in_blocks = gradients()
    assert all(torch.equal(one, other) for one, other in zip(in_blocks, whole, strict=True))
    wide = [
        event.shape for event in counts.copies if event.dtype == torch.float32 and event.shape[-1:] == (16,)
    ]
    assert (5, 16) in wide
    # Forward widens all rows for weights in fp32.
    assert wide.count((26, 16)) == 1, counts.told("copies")


def test_chunks_in_another_order(npu_kernels):
    cases.check_chunks("npu", torch.float32)


@pytest.mark.parametrize("probs_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_nothing_is_searched_summed_or_divided_in_int64(npu_kernels, probs_dtype):
    """int64 work would go to the device's few processor cores; the host also waits for nothing."""
    chosen = cases.routing_of(7, 512, "top 8")
    tokens = torch.randn(7, 16).bfloat16().requires_grad_()
    probs = torch.rand(7, 512).to(probs_dtype).requires_grad_()
    sizes = torch.tensor([20, 0, 30, 6])
    with counted() as counts:
        order = torch.tensor([2, 0, 3, 1])  # on the host
        moved = permute(tokens, chosen, probs, rows=56, topk=8, backend="npu")
        chunks, _ = sort_chunks(moved.tokens, sizes, order, backend="npu")
        back = unpermute(moved.tokens, moved.row_map, 7, backend="npu")
        weighted = unpermute(moved.tokens, moved.row_map, 7, probs, backend="npu")
        total = (
            back.float().sum()
            + weighted.float().sum()
            + chunks.float().square().sum()
            + moved.probs.float().sum()
        )
        torch.autograd.grad(total, (tokens, probs))
    assert {call.name for call in npu_kernels} == {PERMUTE, FINALIZE, f"{PERMUTE}_grad"}
    assert not counts.ai_cpu, counts.told("ai_cpu")
    assert not counts.host_reads, counts.told("host_reads")


def test_uneven_routings_of_known_size_are_not_searched_either(npu_kernels):
    chosen = cases.routing_of(19, 5, "ragged")
    rows = int(chosen.sum())
    with counted() as counts:
        of_counted_routing(chosen, rows).pack()
    assert not counts.ai_cpu, counts.told("ai_cpu")
    assert not counts.host_reads, counts.told("host_reads")


def test_uneven_routings_go_to_the_reference(npu_kernels, caplog):
    """Calls that the manuals exclude reach no operator, and one backend can undo another's permutation."""
    chosen = cases.routing_of(19, 5, "ragged")
    tokens = torch.randn(19, 8)
    rows = int(chosen.sum())
    with pytest.raises(BackendUnavailable, match="every token to go to equally many experts"):
        permute(tokens, chosen, rows=rows, backend="npu")
    from mindspeed_dsa.ops import backend

    before = dict(backend.PREFERENCE)
    backend.PREFERENCE["cpu"] = before["npu"]
    try:
        moved = permute(tokens, chosen, rows=rows)
        back = unpermute(moved.tokens, moved.row_map, 19)
        even = cases.routing_of(13, 4, "top 2")
        probs = torch.rand(13, 4, dtype=torch.float64)
        moved = permute(tokens[:13], even, rows=26, topk=2)
        weighted = unpermute(moved.tokens, moved.row_map, 13, probs)
    finally:
        backend.PREFERENCE.update(before)
    assert torch.allclose(back, tokens * chosen.sum(1)[:, None])
    assert torch.allclose(weighted, tokens[:13] * (probs * even).sum(1)[:, None].float(), atol=1e-6)
    assert [call.name for call in npu_kernels] == [PERMUTE]
    assert "'npu' is skipped for 'reference'" in caplog.text
