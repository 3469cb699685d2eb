"""Indexer losses with the main heads spread over two ranks: each rank computes the loss of all heads."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist

from mindspeed_dsa.ops.indexer_kl_loss import dense_indexer_kl_loss, indexer_kl_loss
from mindspeed_dsa.ops.npu import device as npu_device
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention
from tests.npu import ranks as rank_processes
from tests.npu.selected_indices import causal_indices
from tests.npu.test_indexer_kl_loss import DENSE, SCALE, SPARSE, indexer_leaves, main_inputs, widened
from tests.ops import oracle


def test_two_ranks_equal_all_heads(tmp_path):
    rank_processes.run(_check_rank, 2, tmp_path)


def _check_rank(rank: int, ranks: int) -> None:
    from tests.npu import kernel_parts, kernels

    kernels.register()
    with (
        mock.patch.object(npu_device, "takes_device", lambda device: device == "cpu"),
        mock.patch.object(torch.npu, "get_device_name", return_value="Ascend910_9391"),
    ):
        for per_head in (False, True):
            _check(rank, ranks, per_head)
        # 2 x 8 heads are none of the operator's numbers: the sum over heads is reduced instead.
        _check(rank, ranks, per_head=False, heads=16)
    assert [call.name for call in kernel_parts.calls] == [SPARSE, *DENSE]


def _check(rank: int, ranks: int, per_head: bool, heads: int = 64) -> None:
    inputs = indexer_leaves(2, 40)
    query, key = main_inputs(2, 40, heads, torch.bfloat16, per_head=per_head)
    indices = causal_indices(2, 40, 40, 40)
    mine = slice(rank * heads // ranks, (rank + 1) * heads // ranks)
    reference = widened(inputs)
    if per_head:
        expected = dense_indexer_kl_loss(*reference, query.float(), key.float(), SCALE, backend="reference")
        loss = dense_indexer_kl_loss(
            *inputs, query[:, :, mine], key[:, :, mine], SCALE, tp_group=dist.group.WORLD, backend="npu"
        )
    else:
        expected = indexer_kl_loss(
            *reference, query.float(), key.float(), indices, SCALE, backend="reference"
        )
        lse = sparse_flash_attention(
            query[:, :, mine].float(), key.float(), indices, SCALE, value_dim=512, backend="cpu"
        ).lse
        loss = indexer_kl_loss(
            *inputs,
            query[:, :, mine],
            key,
            indices,
            SCALE,
            lse=lse,
            tp_group=dist.group.WORLD,
            backend="npu",
        )
    assert abs(loss.item() - expected.item()) < 2e-5 * expected.item()
    expected_grads = torch.autograd.grad(expected, reference)
    for grad, expected_grad in zip(torch.autograd.grad(loss, inputs), expected_grads, strict=True):
        assert oracle.relative_error(grad, expected_grad) < 8e-3
