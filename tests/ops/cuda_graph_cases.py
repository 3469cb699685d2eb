"""Calls of all operators for the test of CUDA graphs, with what a capture of each is expected to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mindspeed_dsa.ops.dense_attention import dense_attention, dense_attention_backward
from mindspeed_dsa.ops.documents import attend_by_documents
from mindspeed_dsa.ops.dsa import deepseek_sparse_attention
from mindspeed_dsa.ops.grouped_matmul import grouped_matmul
from mindspeed_dsa.ops.grouped_matmul.backends import Groups
from mindspeed_dsa.ops.indexer_kl_loss import (
    dense_indexer_kl_loss,
    divergence_and_score_gradient,
    indexer_kl_loss,
    kl_loss_of_scores,
)
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer, selected_scores
from mindspeed_dsa.ops.linear_cross_entropy import linear_cross_entropy
from mindspeed_dsa.ops.moe_permute import permute, sort_chunks, unpermute
from mindspeed_dsa.ops.quantised_indexer import quantised_indexer
from mindspeed_dsa.ops.row_ranges import RowForm
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention
from mindspeed_dsa.ops.sparse_flash_attention.by_head import sparse_attention_by_head
from tests.ops import small_cases

BATCH, ROWS, TOPK, SCALE = 1, 6, 3, 0.3
PLAIN, ALL = ("reference",), ("reference", "chunked", "triton")
INDEX = ((BATCH, ROWS, 2, 16), (BATCH, ROWS, 16), (BATCH, ROWS, 2))
MAIN = ((BATCH, ROWS, 2, 24), (BATCH, ROWS, 24))
HEADS = ((BATCH, ROWS, 2, 24), (BATCH, ROWS, 2, 24), (BATCH, ROWS, 2, 16))
TOKENS, HIDDEN, EXPERTS = 8, 16, 4


@dataclass(frozen=True)
class Case:
    """A call of operators.

    Attributes:
        run: function of a backend and of the inputs; returns results, whose gradients are taken too.
        inputs: shapes of the inputs, all of which require gradients.
        backends: backends to try.
        refused: reason why a capture fails, by backend; other backends are captured.
    """

    run: Callable[..., Any]
    inputs: Sequence[tuple[int, ...]]
    backends: tuple[str, ...] = ALL
    refused: dict[str, str] = field(default_factory=dict)


def _select(backend: str, *index: Tensor) -> Any:
    return lightning_indexer(*index, TOPK, backend=backend)


def _attend(backend: str, *inputs: Tensor) -> Any:
    index, main = inputs[:3], inputs[3:]
    indices, scores = _select(backend, *index)
    received = []

    def score_gradient(attention_sum: Tensor) -> Tensor:
        found = divergence_and_score_gradient(scores.detach(), attention_sum, indices, backend=backend)
        received.append(found[0])
        return found[1]

    options = {"value_dim": 16, "backend": backend}
    told = sparse_flash_attention(
        *main, indices, SCALE, topk_scores=scores, score_gradient=score_gradient, **options
    )
    summed = sparse_flash_attention(*main, indices, SCALE, return_attention_sum=True, **options)
    return [told.out, summed.out, summed.attention_sum, summed.lse]


def _losses(backend: str, *inputs: Tensor) -> Any:
    index, main = inputs[:3], [one.detach() for one in inputs[3:]]
    indices, scores = _select(backend, *index)
    told = sparse_flash_attention(
        *main, indices, SCALE, value_dim=16, return_attention_sum=True, backend=backend
    )
    given = [{"lse": told.lse}, {"topk_scores": scores, "attention_sum": told.attention_sum}]
    return [
        *(indexer_kl_loss(*index, *main, indices, SCALE, backend=backend, **one) for one in given),
        dense_indexer_kl_loss(*index, *main, SCALE, backend=backend),
        kl_loss_of_scores(scores, told.attention_sum, indices, backend=backend),
        selected_scores(*index, indices, backend=backend),
        inputs[3].sum() + inputs[4].sum(),
    ]


def _by_head(backend: str, *inputs: Tensor) -> Any:
    indices, _ = _select(backend, *inputs[:3])
    return sparse_attention_by_head(*inputs[3:], indices, SCALE, return_attention_sum=True, backend=backend)


def _quantised(backend: str, query: Tensor, key: Tensor, weights: Tensor) -> Any:
    indices = quantised_indexer(query, key, weights, TOPK, backend=backend)
    return [indices, selected_scores(query, key, weights, indices, backend=backend)]


def _layer(**more: Any) -> Callable[..., Any]:
    def run(backend: str, *inputs: Tensor) -> Any:
        query, key = inputs[3:]
        return deepseek_sparse_attention(
            query,
            key,
            None,
            *inputs[:3],
            topk=TOPK,
            softmax_scale=SCALE,
            value_dim=16,
            with_loss=True,
            backend=backend,
            **more,
        )

    return run


def _layer_of_packs(backend: str, *inputs: Tensor) -> Any:
    bounds = ROWS // 2 * torch.arange(3, dtype=torch.int32, device=inputs[0].device)
    return _layer(cu_seqlens=bounds)(backend, *inputs)


def _documents(backend: str, query: Tensor, key: Tensor, value: Tensor) -> Any:
    ends = (query[0, :, 0, 0] * 0 + torch.tensor(1.0)).cumsum(0).int()
    rows_first = (one.transpose(0, 1) for one in (query, key, value))
    return attend_by_documents(*rows_first, torch.zeros_like(ends), ends, SCALE)


def _dense(backend: str, query: Tensor, key: Tensor, value: Tensor) -> Any:
    call = (query.detach(), key.detach(), value.detach())
    out, lse = dense_attention(*call, SCALE, causal=True, backend=backend)
    gradients = dense_attention_backward(out, *call, out, lse, SCALE, causal=True, backend=backend)
    return [out, lse, *gradients, query.sum() + key.sum() + value.sum()]


def _routing(probs: Tensor) -> Tensor:
    """Return each token's two best experts, bool ``[tokens, experts]``."""
    best = probs.detach().topk(2).indices
    return torch.zeros_like(probs, dtype=torch.bool).scatter(1, best, True)


def _permutation(rows: int | None) -> Callable[..., Any]:
    def run(backend: str, tokens: Tensor, probs: Tensor) -> Any:
        routing = _routing(probs)
        told = permute(tokens, routing, probs, rows=rows, topk=2, backend=backend)
        return [
            told.probs,
            unpermute(told.tokens, told.row_map, TOKENS, probs=probs, backend=backend),
        ]

    return run


def _chunks(backend: str, tokens: Tensor) -> Any:
    return sort_chunks(tokens, torch.tensor([5, 3]), torch.tensor([1, 0]), backend=backend)


def _experts(backend: str, rows: Tensor, weight: Tensor, probs: Tensor) -> Any:
    counts = _routing(probs).sum(0)
    # Counts in the memory of a CPU would be read, as no wait is needed.
    with mock.patch.object(Groups, "on_host", new=False):
        return [grouped_matmul(rows, weight, counts, backend=backend), probs.sum()]


def _cross_entropy(gradient: Any) -> Callable[..., Any]:
    def run(backend: str, hidden: Tensor, weight: Tensor) -> Any:
        labels = hidden.detach().argmax(1)
        return linear_cross_entropy(hidden, weight, labels, gradient=gradient, backend=backend).loss

    return run


def _small(name: str) -> Case:
    case = small_cases.cases()[name]
    return Case(lambda backend, *inputs: case.ours(*inputs, backend=backend), case.inputs, PLAIN)


CASES: dict[str, Case] = {
    "lightning_indexer": Case(_select, INDEX),
    "quantised_indexer": Case(_quantised, INDEX),
    "sparse_flash_attention, with the loss in its backward": Case(_attend, (*INDEX, *MAIN)),
    "sparse_attention_by_head": Case(_by_head, (*INDEX, *HEADS)),
    "indexer_kl_loss, sparse and dense": Case(_losses, (*INDEX, *MAIN)),
    "deepseek_sparse_attention": Case(_layer(), (*INDEX, *MAIN)),
    "deepseek_sparse_attention, warm-up": Case(_layer(stage="warmup"), (*INDEX, *MAIN)),
    "deepseek_sparse_attention of documents that the host knows": Case(
        _layer(form=RowForm((4, 2))), (*INDEX, *MAIN), refused=dict.fromkeys(ALL, "copies from the host")
    ),
    "deepseek_sparse_attention of documents on the device": Case(
        _layer_of_packs, (*INDEX, *MAIN), refused=dict.fromkeys(ALL, "reads the device on the host")
    ),
    "dense_attention": Case(_dense, HEADS, PLAIN),
    "dense attention by documents": Case(
        _documents, HEADS, PLAIN, {"reference": "reads the device on the host"}
    ),
    "rms_norm": _small("norm"),
    "swiglu": _small("swiglu by probabilities"),
    "rotary": _small("rotary, latent attention, YaRN"),
    "moe_permute with the number of rows": Case(
        _permutation(2 * TOKENS),
        ((TOKENS, HIDDEN), (TOKENS, EXPERTS)),
        ("reference", "triton"),
        {"reference": "reads the device on the host"},
    ),
    "moe_permute without the number of rows": Case(
        _permutation(None),
        ((TOKENS, HIDDEN), (TOKENS, EXPERTS)),
        ("reference", "triton"),
        dict.fromkeys(("reference", "triton"), "reads the device on the host"),
    ),
    "sort_chunks": Case(
        _chunks, ((TOKENS, HIDDEN),), ("reference", "triton"), {"triton": "copies from the host"}
    ),
    "grouped_matmul": Case(
        _experts,
        ((2 * TOKENS, HIDDEN), (EXPERTS, HIDDEN, 16), (TOKENS, EXPERTS)),
        ("reference", "triton"),
        {"reference": "reads the device on the host"},
    ),
    "linear_cross_entropy, weight gradient in backward": Case(
        _cross_entropy("backward"), ((TOKENS, HIDDEN), (HIDDEN, HIDDEN)), ("chunked",)
    ),
    "linear_cross_entropy, weight gradient in forward": Case(
        _cross_entropy("forward"),
        ((TOKENS, HIDDEN), (HIDDEN, HIDDEN)),
        ("chunked",),
        {"chunked": "reads the device on the host"},
    ),
}
"""Calls by the names that the documentation shows."""
