"""Dense attention over packed documents with PyTorch's kernel, one call per document."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend_by_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    ends: Tensor,
    softmax_scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Attend from each query to the keys ``starts <= s < ends``.

    Work grows with the squared document lengths. Queries without a visible key get zeros and zero gradients.
    Synchronizes with the device of the ranges.

    Args:
        query: ``[rows, batch, heads, dim]``.
        key: ``[keys, batch, key_heads, dim]``, with ``key_heads`` equal to ``heads`` or a divisor of it.
        value: ``[keys, batch, key_heads, value_dim]``, with ``value_dim`` at most ``dim``.
        starts: ``[rows]`` int, first visible key, the same for all queries of a document. Queries of a
            document are contiguous, and documents are in the order of their keys.
        ends: ``[rows]`` int, one past the last visible key.
        softmax_scale: factor of the scores.
        dropout: dropout rate of the probabilities.

    Returns:
        Output, ``[rows, batch, heads, value_dim]``.
    """
    # scaled_dot_product_attention's fused kernels require values as wide as keys.
    padded = F.pad(value, (0, key.shape[-1] - value.shape[-1]))  # [keys, batch, key_heads, dim]
    outputs = []
    parts = _parts(starts.cpu(), ends.cpu())
    keys, values = (_split(x, [(low, high) for _, low, high, _ in parts]) for x in (key, padded))
    # split, not slices: the gradient of a slice is as large as the tensor it was cut from.
    queries = query.split([rows for rows, *_ in parts])
    for (rows, low, high, causal), q, k, v in zip(parts, queries, keys, values, strict=True):
        if low == high:
            outputs.append(q.new_zeros(*q.shape[:3], value.shape[-1]))
            continue
        mask = None
        if not causal:  # a context parallel rank's queries of the document
            at = sum(out.shape[0] for out in outputs)
            # [rows, high - low], broadcast over batch and heads
            mask = torch.arange(low, high, device=q.device) < ends[at : at + rows, None].to(q.device)
        repeats = q.shape[2] // k.shape[2]
        if repeats > 1:
            k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))  # [high - low, batch, heads, dim]
        # [rows, batch, heads, dim] -> [batch, heads, rows, dim]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=softmax_scale
        )
        outputs.append(out.permute(2, 0, 1, 3)[..., : value.shape[-1]])  # [rows, batch, heads, value_dim]
    if not any(low < high for _, low, high, _ in parts):
        # No query sees a key. An empty output that depends on the inputs gives them zero gradients, not None.
        outputs.append(torch.cat([x[:0].sum().expand(0, *outputs[0].shape[1:]) for x in (query, key, value)]))
    return torch.cat(outputs)  # [rows, batch, heads, value_dim]


def _parts(starts: Tensor, ends: Tensor) -> list[tuple[int, int, int, bool]]:
    """Group consecutive queries by document: ``(query count, first key, end of keys, is causal)``."""
    sees = ends > starts
    begins, counts = torch.unique_consecutive(torch.where(sees, starts, -1), return_counts=True)
    parts, offset = [], 0
    for begin, rows in zip(begins.tolist(), counts.tolist(), strict=True):
        if begin < 0:
            parts.append((rows, 0, 0, False))
        else:
            row_ends = ends[offset : offset + rows]
            high = int(row_ends.max())
            # The queries are the document's own: query i sees the keys begin .. begin + i.
            causal = high - begin == rows and bool((row_ends == torch.arange(begin + 1, high + 1)).all())
            parts.append((rows, begin, high, causal))
        offset += rows
    return parts


def _split(x: Tensor, ranges: list[tuple[int, int]]) -> list[Tensor]:
    """Return the slices of ``x`` along its first axis for ascending disjoint ranges, some possibly empty."""
    sizes, end = [], 0
    for low, high in ranges:
        if low < high:
            # The gap before the range, and the range.
            sizes += [low - end, high - low]
            end = high
    parts = iter(x.split([*sizes, x.shape[0] - end])[1::2])
    return [next(parts) if low < high else x[:0] for low, high in ranges]
