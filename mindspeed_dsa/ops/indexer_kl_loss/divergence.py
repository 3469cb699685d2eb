"""Divergence of the indexer from its target and its gradient, in closed form, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_dsa.ops.precision import total_dtype

# Entries of a block: what is held beside the result stays small, and in cache on a CPU.
_BLOCK = 256 * 1024


def divergence_and_gradient(
    topk_scores: Tensor, attention_sum: Tensor, valid: Tensor, row_weights: Tensor, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The loss, and its gradient with respect to ``topk_scores``, ``[batch, query_length, topk]``."""
    total = torch.promote_types(topk_scores.dtype, total_dtype(topk_scores.device))
    loss = torch.zeros((), dtype=total, device=topk_scores.device)
    gradient = None
    if with_gradient:
        # Parts of it are written below.
        gradient = torch.empty_like(topk_scores, memory_format=torch.contiguous_format)
    rows = max(1, _BLOCK // max(1, topk_scores.shape[-1]))
    # Rows of all sequences, [rows, topk].
    tensors = [x.flatten(0, 1).split(rows) for x in (topk_scores, attention_sum, valid, row_weights)]
    parts = None if gradient is None else gradient.flatten(0, 1).split(rows)
    for number, (scores, summed, names, weights) in enumerate(zip(*tensors, strict=True)):
        per_row, r_minus_p = divergence_of_rows(scores, summed, names)
        loss += (per_row * weights).sum(dtype=total)
        if parts is not None:
            torch.mul(r_minus_p, weights[:, None], out=parts[number])
    return loss.to(topk_scores.dtype), gradient


def divergence_of_rows(scores: Tensor, attention_sum: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Divergence of each row, ``[rows]``, and its gradient with respect to ``scores``, ``[rows, keys]``."""
    # Logarithms of probabilities are bounded below by a finite number, so that 0 * log stays 0.
    lowest = torch.finfo(scores.dtype).min
    log_r = scores.masked_fill(~valid, lowest).log_softmax(dim=-1)
    attention_sum = attention_sum.to(scores.dtype)
    p = attention_sum / attention_sum.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
    log_r.masked_fill_(~valid, 0)
    per_row = torch.xlogy(p, p).sum(dim=-1) - (p * log_r).sum(dim=-1)
    return per_row, log_r.exp_().sub_(p).masked_fill_(~valid, 0)
