"""Sparse attention of rows that lie in several runs of the sequence, one call of the operators for each run.

Ascend's operators know causal rows that end at the last key, which those of a context parallel rank do run by
run, with the keys up to the run's end, of packed documents from the document's begin.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from mindspeed_dsa.features.dsa.problem import Groups, IndexInputs, LossOptions, Operands, Rows
from mindspeed_dsa.features.dsa.sparse_attention import Result, sparse_attention
from mindspeed_dsa.ops.row_ranges import TO_LAST_KEY

Run = tuple[int, int, int, int]
"""First row, end of the rows, begin and end of the keys that the last of them sees; none for padding."""


def in_runs(device: torch.device) -> bool:
    """Whether this device's operators want one run at a time."""
    return device.type == "npu"


def attend_by_runs(
    operands: Operands,
    index: IndexInputs | None,
    topk: int,
    runs: list[Run],
    all_rows: int,
    groups: Groups,
    loss: LossOptions | None,
    backend: str,
) -> Result:
    """As :func:`sparse_attention`, in absorbed form.

    Args:
        operands: of all rows, with the keys of the whole sequence.
        index: likewise.
        topk: keys per row.
        runs: neighbours in the sequence, in the order of the rows.
        all_rows: that the loss is a mean of, on all context parallel ranks.
        groups: ranks with the other heads and the other rows.
        loss: the indexer loss; None for none.
        backend: of the operators.
    """
    results = []
    for first, end, low, high in runs:
        keys = high - low
        part = operands.of(slice(first, end), slice(low, high))
        if keys == 0:
            results.append(_nothing(part, index if loss is not None else None))
            continue
        inputs = None if index is None else index.of(slice(first, end), slice(low, high))
        share = loss
        if loss is not None and not loss.per_token:
            # Of the run's mean in that of all rows; sums over runs add up as they are.
            weight = (end - first) * operands.query.shape[1] * groups.context_ranks / all_rows
            share = replace(loss, coefficient=loss.coefficient * weight)
        ends = torch.arange(keys - (end - first), keys, dtype=torch.int32, device=part.query.device) + 1
        # As made a line above: nobody has to read it back from the device.
        rows = Rows(ends=ends, known=TO_LAST_KEY)
        results.append(sparse_attention(part, inputs, topk, rows, groups, share, backend))
    losses = [result.loss for result in results if result.loss is not None]
    out = torch.cat([result.out for result in results])
    return Result(out, torch.stack(losses).sum() if losses else None)


def _nothing(operands: Operands, index: IndexInputs | None) -> Result:
    """Zeros for rows that see no key, with a graph: other ranks wait for gradients of gathered keys."""
    query, key, value = operands.query, operands.key, operands.value
    zero = query[:0].sum() + key[:0].sum() + value[:0].sum()
    out = query.new_zeros(*query.shape[:2], query.shape[2] * value.shape[1]) + zero
    if index is None:
        return Result(out, None)
    return Result(out, index.query[:0].sum() + index.key[:0].sum() + index.weights[:0].sum())
