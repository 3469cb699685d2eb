"""Calls of DSA's attention in Megatron on an NPU: the loss forms its own target, without a second pass."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.features.dsa.loss import sparse_loss
from mindspeed_dsa.features.dsa.operands import Operands
from mindspeed_dsa.features.dsa.problem import IndexInputs, LossOptions, Problem, Selection
from mindspeed_dsa.features.dsa.sparse_attention import attend_to_chosen
from mindspeed_dsa.ops.backend import BackendUnavailable
from mindspeed_dsa.ops.indexer_kl_loss import indexer_kl_loss, npu
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer
from mindspeed_dsa.ops.sparse_flash_attention import npu as attention_npu
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention
from tests.npu.selected_indices import watch_reads
from tests.npu.test_indexer_kl_loss import SCALE, indexer_leaves, main_inputs, widened
from tests.ops import oracle


def out_and_loss(backend, inputs, query, key, up_value):
    indices, scores = lightning_indexer(*inputs, 2048, backend=backend)
    # Megatron's layout, sequence first
    operands = Operands(query.transpose(0, 1), key.transpose(0, 1)[:, :, None], up_value, SCALE)
    selection = Selection(indices, scores, IndexInputs(*inputs))
    problem = Problem(operands, 2048, loss=LossOptions(0.5, on_chosen_keys=True), backend=backend)
    attended = attend_to_chosen(problem, selection, with_target=True)
    return attended.out, sparse_loss(problem, selection, attended)


def test_loss_takes_the_lse_of_the_attention(npu_kernels, monkeypatch):
    inputs = indexer_leaves(2, 40)
    query, key = main_inputs(2, 40, 64, torch.bfloat16)
    up_value = torch.randn(64, 16, 512, generator=torch.Generator().manual_seed(2))
    reference = widened(inputs)
    expected = out_and_loss("reference", reference, query.float(), key.float(), up_value)
    for module in (attention_npu, npu):
        monkeypatch.setattr(module, "attention_sum", lambda *_: pytest.fail("a pass for nothing"))
    out, loss = out_and_loss("npu", inputs, query, key, up_value.bfloat16())

    assert oracle.relative_error(out.detach(), expected[0].detach()) < 2e-2
    assert abs(loss.item() - expected[1].item()) < 2e-5 * expected[1].item()
    grads = torch.autograd.grad(loss, inputs)
    for grad, expected_grad in zip(grads, torch.autograd.grad(expected[1], reference), strict=True):
        assert oracle.relative_error(grad, expected_grad) < 8e-3
    assert [call.name for call in npu_kernels] == [
        "npu_lightning_indexer",
        "npu_sparse_flash_attention",
        "npu_sparse_lightning_indexer_grad_kl_loss",
    ]


def test_how_often_a_whole_layer_waits_for_the_device(npu_kernels, monkeypatch):
    """The host waits once per forward with indices, never in the indexer of causal rows or in a backward."""
    reads = watch_reads(monkeypatch)
    inputs = indexer_leaves(2, 40)
    query, key = (x.requires_grad_() for x in main_inputs(2, 40, 64, torch.bfloat16))
    indices, scores = lightning_indexer(*inputs, 2048, backend="npu")
    assert len(reads) == 0
    attention = sparse_flash_attention(query, key, indices, SCALE, value_dim=512, backend="npu")
    assert len(reads) == 1
    loss = indexer_kl_loss(*inputs, query, key, indices, SCALE, lse=attention.lse, backend="npu")
    assert len(reads) == 2
    total = attention.out.float().sum() + loss + scores[indices >= 0].sum()
    torch.autograd.grad(total, (query, key, *inputs))
    assert len(npu_kernels) == 4
    assert len(reads) == 2


@pytest.mark.parametrize("change", ["data", "numpy"])
def test_indices_changed_behind_our_back_are_looked_at_again(npu_kernels, change):
    """A row with fewer keys than the operators expect would be computed from uninitialized memory."""
    inputs = indexer_leaves(2, 40)
    query, key = main_inputs(2, 40, 64, torch.bfloat16)
    indices = lightning_indexer(*inputs, 2048, backend="npu").topk_indices
    sparse_flash_attention(query, key, indices, SCALE, value_dim=512, backend="npu")
    changed = indices.data if change == "data" else indices.numpy()
    changed[0, 39, 20:] = -1
    with pytest.raises(BackendUnavailable, match="some row lists another number of keys"):
        sparse_flash_attention(query, key, indices, SCALE, value_dim=512, backend="npu")
