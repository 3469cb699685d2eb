"""Vocabulary weights in parts on tensor and context parallel ranks, and tokens moved between these ranks.

The part of a tensor parallel rank is divided among the context parallel ranks. A rank then needs the tokens
of all context parallel ranks, for its entries of the vocabulary. So token ids and hidden states are gathered
over the context parallel ranks, and embeddings and the gradients of hidden states are reduced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.parallel.collectives import reduce_scatter_tensor
from mindspeed_dsa.parallel.local_shards import Cut

_ATTRIBUTE = "_mindspeed_dsa_vocabulary"


@dataclass(frozen=True)
class VocabularyShard:
    """Part of a vocabulary weight ``[vocabulary, hidden]`` on this rank.

    Attributes:
        first: first entry of the vocabulary on this rank.
        context_group: context parallel group, whose ranks have the other parts of this tensor parallel rank's
            vocabulary, and other tokens.
        group: tensor and context parallel group, whose ranks together have the whole vocabulary.
        cut: position of the part in the tensor parallel rank's weight.
    """

    first: int
    context_group: dist.ProcessGroup
    group: dist.ProcessGroup
    cut: Cut


def mark(weight: Tensor, shard: VocabularyShard) -> None:
    """Declare a weight as a part that differs between context parallel ranks."""
    setattr(weight, _ATTRIBUTE, shard)


def shard_of(weight: Any) -> VocabularyShard | None:
    """Return the part that a weight is, or ``None`` if context parallel ranks have copies of the weight."""
    shard: VocabularyShard | None = getattr(weight, _ATTRIBUTE, None)
    return shard


# -- tokens of all context parallel ranks --------------------------------------------------------


def gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the tensors ``[rows, ...]`` of all ranks to ``[ranks * rows, ...]``, without autograd."""
    whole = tensor.new_empty((group.size() * tensor.shape[0], *tensor.shape[1:]))
    dist.all_gather_into_tensor(whole, tensor.detach().contiguous(), group=group)
    return whole


def gather_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate ``[rows, ...]`` of all ranks; backward sums all ranks' gradients of the own rows."""
    result: Tensor = _Gather.apply(rows, group)
    return result


def sum_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum ``[ranks * rows, ...]`` over ranks, and return the own ``[rows, ...]``; backward gathers."""
    result: Tensor = _Sum.apply(rows, group)
    return result


def own_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the own part of rows ``[ranks * rows, ...]`` that all ranks have; backward gathers gradients."""
    result: Tensor = _Own.apply(rows, group)
    return result


def _summed(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    own = rows.new_empty((rows.shape[0] // group.size(), *rows.shape[1:]))
    reduce_scatter_tensor(own, rows.contiguous(), group=group)
    return own


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gathered(grad, ctx.group), None


class _Own(_Sum):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return rows.chunk(group.size())[group.rank()].clone()
