"""Sparse attention of rows that lie in several runs of the sequence, one call of the operators for each run.

Ascend's operators know causal rows that end at the last key, which those of a context parallel rank do run by
run, with the keys up to the run's end.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from mindspeed_dsa.features.attention.dsa.problem import Groups, IndexInputs, LossOptions, Operands, Rows
from mindspeed_dsa.features.attention.dsa.sparse_attention import Result, sparse_attention

Run = tuple[int, int, int]
"""First row, end of the rows, end of the keys that they see."""


def in_runs(device: torch.device) -> bool:
    """Whether this device's operators want one run at a time."""
    return device.type == "npu"


def attend_by_runs(
    operands: Operands,
    index: IndexInputs | None,
    topk: int,
    runs: list[Run],
    groups: Groups,
    loss: LossOptions | None,
    backend: str,
) -> Result:
    """As :func:`sparse_attention`, of causal rows that no mask leaves out of the loss.

    Args:
        operands: of all rows, with the keys of the whole sequence.
        index: likewise.
        topk: keys per row.
        runs: neighbours in the sequence, in the order of the rows.
        groups: ranks with the other heads and the other rows.
        loss: the indexer loss; None for none.
        backend: of the operators.
    """
    results = []
    for first, end, keys in runs:
        part = replace(operands, query=operands.query[first:end], key=operands.key[:keys])
        inputs = None
        if index is not None:
            inputs = replace(
                index,
                query=index.query[:, first:end],
                key=index.key[:, :keys],
                weights=index.weights[:, first:end],
            )
        share = None
        if loss is not None:
            rows = operands.query.shape[0]
            share = replace(loss, coefficient=loss.coefficient * (end - first) / rows)
        ends = torch.arange(keys - (end - first), keys, dtype=torch.int32, device=part.query.device) + 1
        results.append(sparse_attention(part, inputs, topk, Rows(ends=ends), groups, share, backend))
    losses = [result.loss for result in results if result.loss is not None]
    out = torch.cat([result.out for result in results])
    return Result(out, torch.stack(losses).sum() if losses else None)
