"""Context parallelism of sparse attention, shared by all TorchTitan releases.

TorchTitan splits tokens, labels and positions along the sequence. Each rank's queries stay there, and the
latent keys and index keys of the whole sequence are gathered, unless the job names a strategy of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_dsa.context_parallel.algorithms import registered
from mindspeed_dsa.context_parallel.gather import GatheredRows
from mindspeed_dsa.context_parallel.key_exchange import KeyExchange
from mindspeed_dsa.context_parallel.layout import Contiguous, Layout, Zigzag
from mindspeed_dsa.context_parallel.strategy import ContextParallelStrategy
from mindspeed_dsa.integrations.torchtitan.names import GATHER

LAYOUTS: dict[str | None, Callable[[int], Layout]] = {"headtail": Zigzag, None: Contiguous}
"""Layouts of tokens by value of TorchTitan's ``context_parallel_load_balancer``."""
Context = KeyExchange | ContextParallelStrategy
"""How one layer's queries and keys meet: by gathered keys, or by a strategy of the job."""


class Keys(NamedTuple):
    """Keys of a layer: of this rank's tokens, or of the whole sequence while they are gathered."""

    local: Tensor
    """``[batch, rows, dim]``."""
    gathered: GatheredRows | None = None

    @classmethod
    def start(cls, local: Tensor, context: Context | None) -> Keys:
        """Start to gather keys over context parallel ranks, if they have to be."""
        if not isinstance(context, KeyExchange):
            return cls(local)
        # All tensor parallel ranks gather the same keys, each for its own heads.
        return cls(local, context.gather(local.transpose(0, 1)))

    def wait(self) -> Tensor:
        """Return ``[batch, keys, dim]``."""
        return self.local if self.gathered is None else self.gathered.wait().transpose(0, 1)


def context_of(group: ProcessGroup, balancer: str | None, algorithm: str) -> Context:
    """Return the context parallelism of one layer.

    Args:
        group: context parallel group.
        balancer: value of TorchTitan's ``context_parallel_load_balancer``.
        algorithm: option ``context_parallel_algo``.

    Raises:
        ValueError: the strategy attends in several steps.
    """
    layout = LAYOUTS[balancer](group.size())
    if algorithm == GATHER:
        return KeyExchange(group, layout)
    make = registered(algorithm)
    assert make is not None, "checked with the options"
    strategy = make(group, layout)
    if type(strategy).attend is not ContextParallelStrategy.attend:
        raise ValueError(
            f"npu_dsa: context_parallel_algo {algorithm!r} attends in several steps, and an indexer selects "
            "among all keys of a row at once; register a strategy that has only exchange and merge"
        )
    return strategy


def check(config: Any, algorithm: str, documents: bool) -> None:
    """Raise ``ValueError`` for settings under which sparse attention has no context parallelism.

    Args:
        config: configuration of the job, with ``parallelism`` and ``compile``.
        algorithm: option ``context_parallel_algo``.
        documents: whether tokens see only their own document.
    """
    parallelism, compiled = config.parallelism, config.compile
    degree = f"npu_dsa: context_parallel_degree {parallelism.context_parallel_degree}"
    if parallelism.context_parallel_load_balancer not in LAYOUTS:
        raise ValueError(
            f"{degree}: context_parallel_load_balancer {parallelism.context_parallel_load_balancer!r} deals "
            "out tokens by a mask of FlexAttention, which sparse attention has not; use 'headtail' or None"
        )
    if getattr(parallelism, "spmd_backend", "partial_dtensor") != "partial_dtensor":
        raise ValueError(
            f"{degree} needs spmd_backend 'partial_dtensor': with {parallelism.spmd_backend!r} TorchTitan "
            "hands its context parallel ranks to FlexAttention only"
        )
    if compiled.enable and "model" in compiled.components:
        raise ValueError(
            f"{degree}: transfers between ranks are outside of compiled blocks; leave 'model' out of "
            "compile.components"
        )
    if documents and algorithm != GATHER:
        raise ValueError(
            f"{degree}: context_parallel_algo {algorithm!r} is not told of documents; use {GATHER}, or a "
            "model with the attention 'sdpa'"
        )


class Operands(NamedTuple):
    """Operands of absorbed attention, batch first, with all keys that the queries may see."""

    query: Tensor
    """``[batch, rows, heads, dim]``."""
    key: Tensor
    """``[batch, keys, dim]``."""
    index_query: Tensor
    """``[batch, rows, index_heads, index_dim]``."""
    index_key: Tensor
    """``[batch, keys, index_dim]``."""
    index_weights: Tensor
    """``[batch, rows, index_heads]``, in fp32 also with 16-bit queries."""


def exchanged(strategy: ContextParallelStrategy, mine: Operands) -> tuple[Operands, Tensor | None]:
    """Exchange operands between ranks by a strategy, which sees them as queries, keys and values of one head.

    Args:
        strategy: strategy of the job.
        mine: operands of this rank's tokens.

    Returns:
        Operands of the rows that this rank attends from, and the rows' positions in the sequence, ``[rows]``;
        ``None`` if queries and keys are whole sequences.
    """
    shapes = mine.query.shape[2:], mine.index_query.shape[2:]
    queries = torch.cat([mine.query.flatten(2), mine.index_query.flatten(2)], dim=-1)
    # [batch, rows, dim] -> [rows, batch, 1, dim]
    queries, key, index_key, weights = (
        x.transpose(0, 1).unsqueeze(2) for x in (queries, mine.key, mine.index_key, mine.index_weights)
    )
    sent = strategy.exchange(queries, key, index_key)
    # Weights have another dtype. They need a key and a value to go with them, which are not read.
    unread = weights.detach()[..., :1]
    weights = strategy.exchange(weights, unread, unread).query
    queries, key, index_key, weights = (
        x.squeeze(2).transpose(0, 1) for x in (sent.query, sent.key, sent.value, weights)
    )
    query, index_query = (
        x.unflatten(-1, shape)
        for x, shape in zip(queries.split([s.numel() for s in shapes], dim=-1), shapes, strict=True)
    )
    return Operands(query, key, index_query, index_key, weights), sent.positions
