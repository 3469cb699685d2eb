"""Training steps whose selections come from the test; they run inside the pool's workers."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mindspeed_dsa.features.dsa import sparse_attention
from mindspeed_dsa.ops.lightning_indexer import IndexerOutput, selected_scores
from tests.matrix import sharing_steps, steps
from tests.ops import engine_formulas


def step(
    switches: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    formulas: str = "",
    **arguments: Any,
) -> dict[str, Any]:
    """Run :func:`steps.step`, with keys selected by formulas if ``formulas`` names a scale format."""
    overrides = {**sharing_steps.communication(**arguments), **(overrides or {})}
    instead = mock.patch.object(sparse_attention, "lightning_indexer", _select_by(formulas))
    with instead if formulas else contextlib.nullcontext():
        return steps.step(switches, overrides, **arguments)


def _select_by(formulas: str) -> Any:
    """Return a Lightning Indexer that selects the keys of DeepSeek's FP8 formulas."""

    def lightning_indexer(
        query: Tensor,
        key: Tensor,
        weights: Tensor,
        topk: int,
        *,
        starts: Tensor | None,
        ends: Tensor | None,
        use_relu: bool,
        key_receiver: Tensor | None,
        **others: Any,
    ) -> IndexerOutput:
        rows = query.shape[1]
        starts = torch.zeros(rows) if starts is None else starts
        ends = torch.arange(1, rows + 1) if ends is None else ends
        inputs = [x.detach() for x in (query, key, weights)]
        indices = engine_formulas.selection(inputs, topk, starts, ends, formulas == "ue8m0", use_relu)
        scores = selected_scores(
            query, key, weights, indices, use_relu=use_relu, key_receiver=key_receiver, backend="cpu"
        )
        return IndexerOutput(indices, scores)

    return lightning_indexer
