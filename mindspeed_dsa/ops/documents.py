"""Dense attention over documents that lie one after the other, by PyTorch's kernel, document by document."""

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
    """Attention of each row to the keys ``starts <= s < ends``; work grows with the documents' squares.

    Rows that see nothing get zeros, and so do their gradients. Waits for a device that holds the ranges.

    Args:
        query: ``[rows, batch, heads, dim]``.
        key: ``[keys, batch, key_heads, dim]``, as many heads or a divisor.
        value: ``[keys, batch, key_heads, value_dim]``, no wider than keys.
        starts: ``[rows]`` int, the same for all rows of a document, which lie side by side; documents are in
            the order of their keys.
        ends: ``[rows]`` int, one past the last visible key.
        softmax_scale: factor of the scores.
        dropout: of the probabilities.

    Returns:
        ``[rows, batch, heads, value_dim]``.
    """
    # The kernels require values as wide as keys.
    padded = F.pad(value, (0, key.shape[-1] - value.shape[-1]))
    outputs = []
    parts = _parts(starts.cpu(), ends.cpu())
    keys, values = (_split(x, [(low, high) for _, low, high, _ in parts]) for x in (key, padded))
    # split, not slices: the gradient of a slice is as large as what it was cut from.
    queries = query.split([rows for rows, *_ in parts])
    for (rows, low, high, causal), q, k, v in zip(parts, queries, keys, values, strict=True):
        if low == high:
            outputs.append(q.new_zeros(*q.shape[:3], value.shape[-1]))
            continue
        mask = None
        if not causal:  # a context parallel rank's rows of the document
            at = sum(out.shape[0] for out in outputs)
            mask = torch.arange(low, high, device=q.device) < ends[at : at + rows, None].to(q.device)
        repeats = q.shape[2] // k.shape[2]
        if repeats > 1:
            k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
        # [rows, batch, heads, dim] -> [batch, heads, rows, dim]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=softmax_scale
        )
        outputs.append(out.permute(2, 0, 1, 3)[..., : value.shape[-1]])
    if not any(low < high for _, low, high, _ in parts):
        # Zeros with a graph: gradients of everything are zeros too, and known.
        outputs.append(torch.cat([x[:0].sum().expand(0, *outputs[0].shape[1:]) for x in (query, key, value)]))
    return torch.cat(outputs)


def _parts(starts: Tensor, ends: Tensor) -> list[tuple[int, int, int, bool]]:
    """Rows side by side that see one document: how many, their keys, and whether these are the rows' own."""
    sees = ends > starts
    begins, counts = torch.unique_consecutive(torch.where(sees, starts, -1), return_counts=True)
    parts, at = [], 0
    for begin, rows in zip(begins.tolist(), counts.tolist(), strict=True):
        if begin < 0:
            parts.append((rows, 0, 0, False))
        else:
            own = ends[at : at + rows]
            high = int(own.max())
            causal = high - begin == rows and bool((own == torch.arange(begin + 1, high + 1)).all())
            parts.append((rows, begin, high, causal))
        at += rows
    return parts


def _split(x: Tensor, ranges: list[tuple[int, int]]) -> list[Tensor]:
    """Parts of ``x`` along its first axis: ascending ranges without overlap, empty ones anywhere."""
    sizes, at = [], 0
    for low, high in ranges:
        if low < high:
            sizes += [low - at, high - low]
            at = high
    parts = iter(x.split([*sizes, x.shape[0] - at])[1::2])
    return [next(parts) if low < high else x[:0] for low, high in ranges]
