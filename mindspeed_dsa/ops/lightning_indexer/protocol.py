"""Call object of the Lightning Indexer, and the protocol of its backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_dsa.ops.backend import Backend, Call
from mindspeed_dsa.ops.row_ranges import Ranges


@dataclass(frozen=True)
class IndexerCall(Call):
    """Arguments of the index scores; their shapes have been checked.

    Attributes:
        query: ``[batch, query_length, heads, head_dim]``, any strides.
        key: ``[batch, key_length, head_dim]``, in the dtype of the query.
        weights: ``[batch, query_length, heads]``, in any floating dtype.
        use_relu: whether the product of each head is clamped at zero.
        pool: number of consecutive keys that a selection takes together; selections of more than one are of
            pools, numbered from 0, whose score is the highest of the keys that the row sees.
        plan: result of the backend's ``plan_call``; None in calls of ``selected_scores`` and ``scores_at``
            without a selection.
    """

    query: Tensor
    key: Tensor
    weights: Tensor
    use_relu: bool = True
    pool: int = 1
    plan: Any = None


def pools_of(ranges: Ranges, pool: int) -> Ranges:
    """Return the ranges of the pools of which rows see some key."""
    seen = ranges.starts < ranges.ends
    ends = torch.where(seen, (ranges.ends - 1) // pool + 1, 0)  # [batch, query_length]
    return Ranges(ranges.starts // pool, ends.to(torch.int32), False)


def pooled(scores: Tensor, starts: Tensor, ends: Tensor, pool: int) -> Tensor:
    """Return the highest visible score of each pool: ``[..., keys]`` -> ``[..., pools]``, -inf without one.

    Args:
        scores: ``[..., keys]``, overwritten; undefined where a row does not see a key.
        starts: ``[...]``, first visible key.
        ends: ``[...]``, one past the last visible key.
        pool: number of keys of a pool.
    """
    keys = scores.shape[-1]
    position = torch.arange(keys, device=scores.device)
    hidden = (position < starts[..., None]) | (position >= ends[..., None])
    scores = F.pad(scores.masked_fill_(hidden, -torch.inf), (0, -keys % pool), value=-torch.inf)
    return scores.unflatten(-1, (scores.shape[-1] // pool, pool)).amax(dim=-1)


class _Indexer(Backend, Protocol):
    def plan_call(self, call: IndexerCall, topk: int, ranges: Ranges, in_order: bool, /) -> Any:
        """Return the call's plan, or why it is declined: see :func:`mindspeed_dsa.ops.backend.plan`."""


class AutogradIndexer(_Indexer, Protocol):
    """Backend without its own backward: autograd differentiates its functions."""

    KIND: Literal["autograd"]

    def lightning_indexer(self, call: IndexerCall, topk: int, ranges: Ranges, /) -> tuple[Tensor, Tensor]:
        """Return indices and scores of the selected keys, ``[batch, query_length, topk]`` each."""

    def selected_scores(self, call: IndexerCall, topk_indices: Tensor, /) -> Tensor:
        """Return the scores of the keys in ``topk_indices``, in its shape, -inf where there is no key."""


class GradientIndexer(_Indexer, Protocol):
    """Backend with its own backward."""

    KIND: Literal["gradients"]

    def select(self, call: IndexerCall, topk: int, ranges: Ranges, /) -> tuple[Tensor, Tensor]:
        """Return indices and scores of the selected keys, ``[batch, query_length, topk]`` each."""

    def scores_at(self, call: IndexerCall, topk_indices: Tensor, /) -> Tensor:
        """Return the scores of the keys in ``topk_indices``, in its shape, -inf where there is no key."""

    def score_gradients(
        self, call: IndexerCall, topk_indices: Tensor, grad_scores: Tensor, /
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the scores at ``topk_indices`` with respect to query, key and weights.

        The key's gradient, a sum over queries, may have a wider dtype than the key.
        """


Indexer = AutogradIndexer | GradientIndexer
