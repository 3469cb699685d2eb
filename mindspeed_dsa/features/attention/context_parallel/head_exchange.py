"""Ulysses all-to-all: exchange heads for tokens within groups of neighbouring ranks.

After the exchange each rank has the tokens of its whole group, for a share of the heads.

In a zigzag layout over ``c`` ranks, a group of ``u`` neighbours holds the same tokens as one rank in a zigzag
over ``c / u`` ranks. :func:`in_order` sorts a group's tokens as a ring across the groups expects them.
Without a ring (``u = c``) this is the order of the sequence.
"""

from __future__ import annotations

from functools import lru_cache
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_dsa.context_parallel.gather import GatheredRows, HeldRows, Members
from mindspeed_dsa.context_parallel.layout import Layout, Zigzag, rows_of_all
from mindspeed_dsa.features.attention.context_parallel.dense import DenseAttention, FromLatents, Payload
from mindspeed_dsa.features.attention.context_parallel.ring import (
    PackedRows,
    PayloadStrategy,
    plan_of_pack,
    ring_attention,
)
from mindspeed_dsa.parallel.all_to_all import InFlight, start
from mindspeed_dsa.parallel.names import named
from mindspeed_dsa.platforms.host_pool import upload


class SharedMembers(WeakValueDictionary[tuple[int, Tensor], Members]):
    """Dict from group identity and token order to :class:`Members`, shared by all layers of a session.

    Values are weak references, so that an unused group is destroyed with its threads.
    """

    def of_order(self, group: ProcessGroup, order: Tensor) -> Members:
        """Return the members of a group for a token order, created on first use."""
        members = self.get((id(group), order))
        if members is None:
            # The inverse permutation: position of each rank's tokens within the group's ordered tokens.
            members = Members(group, HeldRows(order.argsort().view(group.size(), -1)))
            self[id(group), order] = members
        return members


class HeadExchange(PayloadStrategy):
    """Strategy ``ulysses_cp_algo``, or ``hybrid_cp_algo`` with a ring across groups.

    For MLA, only the query heads are exchanged. The latents are all-gathered, because they are smaller than
    the keys and values of all heads, and each rank expands them for its own heads.

    Args:
        group: process group of context parallel ranks.
        heads: process group of the neighbours that exchange heads; None: ``group``.
        across: process group of the ring, which has one rank of each neighbour group; None: no ring.
        shared: members that all layers share.
    """

    def __init__(
        self,
        group: ProcessGroup,
        heads: ProcessGroup | None = None,
        across: ProcessGroup | None = None,
        shared: SharedMembers | None = None,
    ) -> None:
        super().__init__(group)
        self._heads = group if heads is None else heads
        self._across, self._shared = across, SharedMembers() if shared is None else shared
        self._of_pack: Members | None = None

    def attend_payload(
        self, inner: DenseAttention, query: Tensor, payload: Payload, packed: PackedRows | None = None
    ) -> Tensor:
        """Exchange heads, compute attention, and exchange back; see :meth:`PayloadStrategy.attend_payload`.

        Raises:
            ValueError: the heads cannot be divided evenly among the ranks.
        """
        ranks, order, plan = self._heads.size(), None, None
        check_heads(query.size(2), payload, ranks)
        if packed is not None:
            plan = plan_of_pack(packed.pack, packed.layout, self.rank // ranks, ranks)
            order = _order_of_pack(packed.layout, packed.pack.length, self.rank // ranks, ranks)
        # Start with the query: its exchange overlaps the gather of the latents, or the exchange of keys.
        flight = self._send(query)
        if isinstance(payload.expansion, FromLatents):
            payload = self._gathered(payload, payload.expansion, order)
        else:
            rows = self._send(_enough_heads(payload.rows, ranks))
            payload = payload.with_rows(in_order(rows.wait(), ranks, order))
        query = in_order(flight.wait(), ranks, order)
        return self._rows_again(ring_attention(inner, query, payload, self._across, plan), order)

    def _send(self, states: Tensor) -> InFlight:
        """Start to exchange heads of ``[rows, b, heads, dim]`` for tokens."""
        # [ranks, rows, b, heads / ranks, dim]
        parts = states.unflatten(2, (self._heads.size(), -1)).movedim(2, 0)
        with named("heads of attention"):
            return start(parts.flatten(0, 1), None, None, self._heads)

    def _rows_again(self, out: Tensor, order: Tensor | None) -> Tensor:
        """Undo the exchange: ``[ranks * rows, b, heads / ranks, dim]`` back to ``[rows, b, heads, dim]``."""
        ranks = self._heads.size()
        with named("output of attention"):
            arrived = start(by_rank(out, ranks, order), None, None, self._heads).wait()
        # [ranks, rows, b, heads / ranks, dim] -> [rows, b, heads, dim]
        rows: Tensor = arrived.unflatten(0, (ranks, -1)).movedim(0, 2).flatten(2, 3)
        return rows

    def _gathered(self, payload: Payload, expansion: FromLatents, order: Tensor | None) -> Payload:
        rows, ranks = payload.rows.size(0) * self._heads.size(), self._heads.size()
        if order is not None:
            members = self._of_pack = self._shared.of_order(self._heads, order)
        else:
            members = Members.of(self._heads, Zigzag(ranks), rows)
        (weight,) = payload.weights
        own_heads, part = expansion.of_heads(weight, self._heads.rank(), ranks)
        latents = GatheredRows(payload.rows, members).wait()  # [ranks * rows, b, 1, latent + rope]
        return Payload(latents, own_heads, (part,))


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # a cached tensor may be created in evaluation and saved by autograd in training
def _order_of_pack(layout: Layout, length: int, number: int, ranks: int) -> Tensor:
    """Return the permutation of neighbours' tokens from rank order to pack order: ``[rows]`` int64, host."""
    held = rows_of_all(layout, length)  # [all ranks, rows], positions in the pack
    return held.view(-1, ranks, held.size(1))[number].flatten().argsort()


def check_heads(heads: int, payload: Payload, ranks: int) -> None:
    """Raise ``ValueError`` unless query heads and key-value heads can be divided evenly among ``ranks``."""
    latent = isinstance(payload.expansion, FromLatents)
    kv_heads = heads if latent else payload.rows.size(2)
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ValueError(
            f"{heads} heads with {kv_heads} key-value heads on a tensor parallel rank cannot be shared by "
            f"{ranks} ranks that exchange heads; use --context-parallel-algo megatron_cp_algo, or "
            "hybrid_cp_algo with a --ulysses-degree-in-cp that divides them"
        )


def _enough_heads(rows: Tensor, ranks: int) -> Tensor:
    """Repeat key-value heads until each rank gets one. Autograd sums the gradients of the copies."""
    return rows if rows.size(2) >= ranks else rows.repeat_interleave(ranks // rows.size(2), dim=2)


def in_order(arrived: Tensor, ranks: int, order: Tensor | None) -> Tensor:
    """Reorder tokens: all ranks' first halves in rank order, then second halves in reverse rank order.

    Args:
        arrived: tokens ``[ranks * rows, ...]``, concatenated in rank order.
        ranks: number of ranks.
        order: permutation ``[ranks * rows]`` int64 for packed documents; None for a zigzag.
    """
    if order is not None:
        return arrived.index_select(0, upload(order, arrived.device))
    if ranks == 1:
        return arrived
    # Ranks 0, 1 of 4 chunks hold 0 3 | 1 2: first halves 0 1, second halves reversed 2 3.
    halves = arrived.unflatten(0, (ranks, 2, -1))  # [ranks, 2, rows / 2, ...]
    return torch.cat([halves[:, 0].flatten(0, 1), halves[:, 1].flip(0).flatten(0, 1)])


def by_rank(rows: Tensor, ranks: int, order: Tensor | None) -> Tensor:
    """Undo :func:`in_order`: return the tokens to rank order."""
    if order is not None:
        return rows.index_select(0, upload(order.argsort(), rows.device))
    if ranks == 1:
        return rows
    first, second = (half.unflatten(0, (ranks, -1)) for half in rows.chunk(2))  # [ranks, rows / 2, ...] each
    return torch.stack([first, second.flip(0)], dim=1).flatten(0, 2)
