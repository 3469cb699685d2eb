"""What runs inside the pool's workers: fused DSA beside Megatron's own, on the same weights and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.features.attention import core_cases, job

_topk = torch.Tensor.topk


def stable_topk(scores: Tensor, k: int, dim: int = -1, **others: Any) -> Any:
    """``Tensor.topk`` with the operators' rule for equal scores, which PyTorch's leaves open."""
    if others:  # the operators' own call, whose keys hold the rule
        return _topk(scores, k, dim, **others)
    values, indices = scores.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


def ties_to_the_lowest() -> Any:
    """Megatron's indexer asks the scores for their ``topk``."""
    return mock.patch.object(torch.Tensor, "topk", stable_topk)


def one_step(
    switches: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    mode: str = "train",
) -> dict[str, Any]:
    """As :func:`core_cases.one_step`, ties decided alike on both sides."""
    with ties_to_the_lowest():
        return core_cases.one_step(overrides or {}, switches, mode)


def whole_step(switches: Mapping[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
    """As :func:`job.run`, ties decided alike on both sides."""
    with ties_to_the_lowest():
        return job.run(switches, **arguments)
