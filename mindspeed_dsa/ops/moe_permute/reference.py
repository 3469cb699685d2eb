"""Permutation of tokens by expert in plain PyTorch: gather, indexed sum, autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.moe_permute.row_map import Permutation, of_routing, unpack

KIND: Literal["autograd"] = "autograd"


def unsupported(shape: ShapeClass) -> str | None:
    """None: the reference takes every shape."""
    return None


def plan_permute(tokens: Tensor, probs: Tensor | None, topk: int | None) -> Any:
    """None: the reference takes every call."""


def plan_unpermute(row_map: Tensor, rows: int, probs: Tensor | None) -> Any:
    """None: the reference takes every call."""


def permute(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None, rows: int | None, topk: int | None
) -> Permutation:
    """Rows expert by expert."""
    found = of_routing(routing_map, rows)
    permuted_probs = None
    if probs is not None:
        permuted_probs = probs.reshape(-1).index_select(0, found.slots(routing_map.shape[1]))
    return tokens.index_select(0, found.tokens), permuted_probs, found.pack()


def unpermute(
    permuted: Tensor, row_map: Tensor, tokens: int, probs: Tensor | None, addend: Tensor | None
) -> Tensor:
    """Each token's rows, weighted and added up: ``[tokens, hidden]``."""
    found = unpack(row_map, tokens, len(permuted))
    total = permuted.to(torch.promote_types(permuted.dtype, torch.float32))
    if probs is not None:
        weights = probs.reshape(-1).index_select(0, found.slots(probs.shape[1]))
        total = total * weights.to(total.dtype)[:, None]
    total = total.new_zeros(tokens, total.shape[1]).index_add(0, found.tokens, total)
    if addend is not None:
        total = total + addend
    return total.to(permuted.dtype)


def sort_chunks(tensors: Sequence[Tensor], split_sizes: Tensor, order: Tensor) -> tuple[Tensor, ...]:
    """Chunks of rows in another order, the same for each tensor."""
    sizes, places = split_sizes.tolist(), order.tolist()
    return tuple(torch.cat([tensor.split(sizes)[place] for place in places]) for tensor in tensors)
