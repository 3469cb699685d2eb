"""Calls that reach every kernel, in every configuration that the launching code can pick."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import torch

from benchmarks.released import INDEX_DIM, MODELS, ROPE, Released
from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.grouped_matmul import Groups
from mindspeed_dsa.ops.grouped_matmul import triton as grouped
from mindspeed_dsa.ops.indexer_kl_loss import triton as kl_loss
from mindspeed_dsa.ops.lightning_indexer import triton as indexer
from mindspeed_dsa.ops.moe_permute import triton as permutation
from mindspeed_dsa.ops.quantised_indexer import triton as quantised
from mindspeed_dsa.ops.sparse_flash_attention import hopper
from mindspeed_dsa.ops.sparse_flash_attention import triton as attention
from mindspeed_dsa.ops.sparse_flash_attention.protocol import AttentionCall
from mindspeed_dsa.ops.sparse_flash_attention.shared_tiles import share_tiles, tasks_of
from mindspeed_dsa.ops.triton.launch import HOPPER, capability_of, meta

Call = tuple[str, Callable[[], object]]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOPK = 2048
# Blocks have 16, 32 or 64 heads; one head, and counts that are no multiples of 16, compile separately.
HEADS = (16, 32, 64)
ODD_HEADS = (1, 8, 24, 40)
# Above 2^31 numbers a stride is passed in 64 bits.
SHORT, LONG = 8192, 131072
GLM = MODELS["glm-5"]
# The backward on Hopper: one kernel for all gradients of a row, or tiles of keys that rows share.
WAYS = BY_ROWS, BY_TILES = "by rows", "by tiles"
INDEXERS = ((64, 128), (32, 128), (8, 64), (128, 256))


def all_cases(dtype: torch.dtype, odd: bool = False) -> Iterator[Call]:
    """Yield calls for every choice of tiles, in both modes of determinism.

    Args:
        dtype: operators' input dtype.
        odd: whether to add sizes that take the same tiles but compile to other code.
    """
    for deterministic in (False, True):
        mode = ", deterministic" if deterministic else ""
        for heads in (*HEADS, *(ODD_HEADS if odd else ())):
            yield f"{heads} heads{mode}", _in_mode(deterministic, partial(run_attention, dtype, heads))
            for way in WAYS:
                words = f"{heads} heads, {way}{mode}"
                yield words, _in_mode(deterministic, partial(run_backward, dtype, heads, way))
        for heads, dim in INDEXERS:
            for use_relu in (True, False) if odd else (True,):
                words = f"indexer {heads} x {dim}{'' if use_relu else ' without relu'}{mode}"
                yield words, _in_mode(deterministic, partial(run_indexer, dtype, heads, dim, use_relu))
    for heads, dim in INDEXERS:
        words = f"indexer {heads} x {dim}"
        yield f"{words} in fp8", partial(run_quantised_indexer, dtype, heads, dim)
    for heads in HEADS:
        yield f"{heads} heads, plain", _in_mode(False, partial(run_plain_attention, dtype, heads))
    if odd:
        yield "128 heads, 128k", partial(run_attention, dtype, 128, length=LONG)
        yield "16 heads, no rope", partial(run_attention, dtype, 16, 128, 128)
    yield "one row behind others", partial(run_last_row, dtype)
    yield "one head of 256 + 256", partial(run_head, dtype, GLM)
    for heads, dim, shared in ((128, 576, True), (16, 192, False), (16, 576, False)):
        kind = "shared" if shared else "per head"
        yield f"loss, {heads} heads of {dim} {kind}", partial(run_loss, dtype, heads, dim, shared)
    yield (
        "loss, 64 heads of 256 per head",
        partial(run_loss, dtype, 64, 256, False, index_heads=GLM.index_heads),
    )
    yield "loss of entries", partial(run_loss, dtype, 128, 576, True, TOPK)
    yield "64 experts", partial(run_permutation, dtype)
    yield "64 experts, grouped", partial(run_grouped, dtype)


def quick_cases(dtype: torch.dtype) -> Iterator[Call]:
    """Yield a small call for every kernel that runs when determinism is not requested, or waits for a GPU."""
    yield "16 heads", partial(run_attention, dtype, 16, sums=(False,))
    yield "32 heads, by rows", partial(run_backward, dtype, 32, BY_ROWS, sums=(False,))
    yield "64 heads", partial(run_attention, dtype, 64, sums=(False,))
    yield "128 heads", partial(run_forward, dtype, 128)
    yield "one row behind others", partial(run_last_row, dtype)
    yield "16 heads, plain", partial(run_plain_attention, dtype, 16)
    yield "indexer 8 x 64", partial(run_indexer, dtype, 8, 64)
    yield "indexer 64 x 128 in fp8", partial(run_quantised_indexer, dtype, 64, 128)
    yield "loss, 16 heads of 192 per head", partial(run_loss, dtype, 16, 192, False)
    yield "64 experts", partial(run_permutation, dtype)
    yield "64 experts, grouped", partial(run_grouped, dtype)


def _in_mode(deterministic: bool, call: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(deterministic)
        try:
            call()
        finally:
            torch.use_deterministic_algorithms(before)

    return run


def _shape(dtype: torch.dtype, **sizes: int) -> ShapeClass:
    return ShapeClass("meta", dtype, tuple(sizes.items()))


def run_attention(
    dtype: torch.dtype,
    heads: int,
    dim: int = 576,
    value_dim: int = 512,
    length: int = SHORT,
    sums: tuple[bool, ...] = (True, False),
) -> None:
    """Compile forward, sum over heads, and backward with and without it."""
    shape = _shape(dtype, heads=heads, dim=dim, value_dim=value_dim, topk=TOPK)
    attention.rehearse(shape, length, length, sums)


def run_backward(
    dtype: torch.dtype, heads: int, way: str, length: int = SHORT, sums: tuple[bool, ...] = (True, False)
) -> None:
    """Compile one way of the backward with and without the sum over heads; others are for Hopper only."""
    query, key = meta(1, length, heads, 576, dtype=dtype), meta(1, length, 576, dtype=dtype)
    call = AttentionCall(query, key, meta(1, length, TOPK, dtype=torch.int32), 1.0, 512)
    out, lse = meta(1, length, heads, 512, dtype=dtype), meta(1, length, heads, dtype=torch.float32)
    with mock.patch.object(hopper, "prefers_rows", return_value=way == BY_ROWS):
        for with_sum in sums:
            attention.backward(call, out, out, lse, with_sum)


def run_last_row(dtype: torch.dtype) -> None:
    """Compile the kernels that order the entries of a single row.

    Triton compiles arguments that are 1 separately. Only half precision kernels take entries in that order.
    """
    if capability_of(torch.device("meta")) == HOPPER and dtype != torch.float32:
        indices, lengths = meta(1, TOPK, dtype=torch.int32), meta(1, dtype=torch.int32)
        shared = share_tiles(indices, lengths, SHORT, SHORT + 1, SHORT, SHORT)
        tasks_of(shared.ends, lengths, TOPK, SHORT)


def run_forward(dtype: torch.dtype, heads: int, dim: int = 576, value_dim: int = 512) -> None:
    """Compile forward and sum over heads."""
    query, key = meta(1, SHORT, heads, dim, dtype=dtype), meta(1, SHORT, dim, dtype=dtype)
    indices = meta(1, SHORT, TOPK, dtype=torch.int32)
    attention.forward(AttentionCall(query, key, indices, 1.0, value_dim), True)


def run_head(dtype: torch.dtype, model: Released) -> None:
    """Compile attention of a head with its own key and value; the value precedes the key."""
    key_dim = model.nope + ROPE
    run_attention(dtype, 1, model.value + key_dim, model.value)


def run_plain_attention(dtype: torch.dtype, heads: int) -> None:
    """Compile attention without the Hopper-only kernels, as with an unsupported Triton."""
    with mock.patch.object(hopper, "takes", return_value=False):
        run_attention(dtype, heads, sums=(False,))


def run_indexer(dtype: torch.dtype, heads: int, dim: int, use_relu: bool = True) -> None:
    """Compile selection, scores at entries and gradients, unless the target declines the indexer."""
    shape = _shape(dtype, heads=heads, head_dim=dim, topk=TOPK)
    if indexer.unsupported_index_sizes(shape, heads, dim) is None:
        indexer.rehearse(shape, SHORT, SHORT, use_relu)


def run_quantised_indexer(dtype: torch.dtype, heads: int, dim: int) -> None:
    """Compile the selection from products of e4m3 numbers, or of the same numbers in bf16, by target."""
    shape = _shape(dtype, heads=heads, head_dim=dim, topk=TOPK)
    if indexer.unsupported_index_sizes(shape, heads, dim) is None:
        quantised.rehearse(shape, SHORT, SHORT)


def run_loss(
    dtype: torch.dtype, heads: int, dim: int, shared: bool, topk: int = 0, index_heads: int = 64
) -> None:
    """Compile the dense loss, or with ``topk`` the sparse one; by default for DeepSeek-V3.2's indexer."""
    index = {
        "key_heads": 1 if shared else heads,
        "index_heads": index_heads,
        "index_dim": INDEX_DIM,
        "topk": topk,
    }
    kl_loss.rehearse(_shape(dtype, heads=heads, dim=dim, **index), SHORT, SHORT)


def run_permutation(dtype: torch.dtype, hidden: int = 7168, experts: int = 64, topk: int = 8) -> None:
    """Compile every kernel of the permutation of tokens by expert, with probabilities in fp32."""
    count = 64
    tokens, routing_map = meta(count, hidden, dtype=dtype), meta(count, experts, dtype=torch.bool)
    probs, rows = meta(count, experts, dtype=torch.float32), count * topk
    moved, moved_probs, row_map = permutation.permute(tokens, routing_map, probs, rows, topk)
    permutation.permute_gradients(moved, moved_probs, row_map, routing_map)
    permutation.unpermute(moved, row_map, count, None, tokens)
    permutation.unpermute_gradients(tokens, row_map, rows, None, None)
    permutation.unpermute(moved, row_map, count, probs, None)
    permutation.unpermute_gradients(tokens, row_map, rows, moved, probs)
    chunks = meta(experts, dtype=torch.int64)
    permutation.sort_chunks([moved, moved_probs], chunks, chunks)


def run_grouped(dtype: torch.dtype, width_in: int = 2048, width_out: int = 1024, groups: int = 64) -> None:
    """Compile the products of grouped experts in both layouts of their weights, and the weight gradients."""
    rows, grad = meta(64, width_in, dtype=dtype), meta(64, width_out, dtype=dtype)
    weight = meta(groups, width_in, width_out, dtype=dtype)
    by_group = Groups(meta(groups, dtype=torch.int64))
    grouped.multiply(rows, weight, by_group)
    grouped.multiply(grad, weight.mT, by_group)
    for target in (torch.float32, dtype):
        into = meta(groups, width_in, width_out, dtype=target)
        grouped.weight_gradient(rows, grad, by_group, into, accumulate=target == torch.float32)
