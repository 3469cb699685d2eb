"""CPU kernels of the permutation of tokens by expert, written from torch_npu's manuals."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.npu.kernel_parts import Call, calls

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def npu_moe_token_permute_with_routing_map(
    tokens: Tensor,
    routing_map: Tensor,
    *,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    name = "npu_moe_token_permute_with_routing_map"
    topk = _check_map(name, tokens, routing_map, drop_and_pad)
    assert num_out_tokens == len(tokens) * topk, f"{name}: num_out_tokens is tokens x topk"
    assert probs is None or (probs.shape == routing_map.shape and probs.dtype == tokens.dtype), name
    # The k-th expert of a token, in ascending order, and the rows when all pairs are sorted by expert.
    expert = routing_map.nonzero()[:, 1]
    order = expert.argsort(stable=True)
    listed = torch.empty(len(order), dtype=torch.int32)
    listed[order] = torch.arange(len(order), dtype=torch.int32)
    token = order // topk
    permuted_probs = torch.empty(0) if probs is None else probs[token, expert[order]]
    calls.append(Call(name, "", (len(tokens),)))
    if probs is None:
        return tokens[token], None, listed  # type: ignore[return-value]
    return tokens[token], permuted_probs, listed


def npu_moe_token_permute_with_routing_map_grad(
    permuted_token_out_grad: Tensor,
    probs_grad: Tensor | None,
    sorted_indices: Tensor,
    routing_map: Tensor,
    experts_num: int,
    tokens_num: int,
    drop_and_pad: bool,
) -> tuple[Tensor, Tensor]:
    name = "npu_moe_token_permute_with_routing_map_grad"
    topk = _check_map(name, permuted_token_out_grad, routing_map, drop_and_pad)
    assert (tokens_num, experts_num) == tuple(routing_map.shape), name
    assert sorted_indices.dtype == torch.int32, name
    rows = permuted_token_out_grad[sorted_indices.long()].view(tokens_num, topk, -1)
    grad = rows.float().sum(1).to(rows.dtype)
    calls.append(Call(name, "", (tokens_num,)))
    if probs_grad is None:
        return grad, None  # type: ignore[return-value]
    assert probs_grad.dtype == permuted_token_out_grad.dtype, name
    dense = torch.zeros(tokens_num, experts_num, dtype=probs_grad.dtype)
    dense[routing_map] = probs_grad[sorted_indices.long()]
    return grad, dense


def npu_moe_finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> Tensor:
    name = "npu_moe_finalize_routing"
    assert drop_pad_mode == 0, f"{name}: the manual names mode 0 alone"
    assert (skip2, bias, export_for_source_row) == (None,) * 3, name
    assert expanded_src_to_dst_row.dtype == torch.int32, name
    assert k == 1, f"{name}: a CANN without aclnnMoeFinalizeRoutingV4 takes no k"
    # [rows, k]; without them every row has one expert.
    assert scales is not None, name
    assert scales.dtype == expanded_permuted_rows.dtype, name
    rows, k = scales.shape
    # The index of row i's j-th expert is at i + j * rows.
    at = expanded_src_to_dst_row.view(k, rows).long()
    total = (expanded_permuted_rows[at].float() * scales.t()[..., None].float()).sum(0)
    if skip1 is not None:
        assert skip1.shape == total.shape, name
        assert skip1.dtype == expanded_permuted_rows.dtype, name
        total = total + skip1.float()
    calls.append(Call(name, "" if skip1 is None else "skip1", (rows,)))
    return total.to(expanded_permuted_rows.dtype)


def _check_map(name: str, tokens: Tensor, routing_map: Tensor, drop_and_pad: bool) -> int:
    assert tokens.dtype in _DTYPES, f"{name}: {tokens.dtype}"
    assert routing_map.dtype in (torch.bool, torch.int8), f"{name}: {routing_map.dtype}"
    assert not drop_and_pad, name
    counts = routing_map.sum(1)
    assert bool((counts == counts[0]).all()), f"{name}: every row of routing_map holds equally many"
    return int(counts[0])
