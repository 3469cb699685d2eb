"""One layer's keys on their way between the ranks that share a sequence.

Queries stay where their rows are. What is gathered is small: the latent key that all heads share and the
indexer's key, each projected from a rank's own rows.

Imports Megatron only when called: these functions are fetched while Megatron is being imported.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_dsa.context_parallel.gather import LATEST, GatheredRows, KeyGather, freed_until_backward
from mindspeed_dsa.context_parallel.layout import Layout, Zigzag
from mindspeed_dsa.context_parallel.packs import PackRows
from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.megatron.dsa import Options
from mindspeed_dsa.patches import versions

_graph_task_id = versions.private("torch._C:_current_graph_task_id", "DSA's context parallelism")
ATTRIBUTE = "_key_exchange"
"""Of a core attention that shares keys."""


class KeyExchange:
    """Exchange of one DSA layer's keys between context parallel ranks.

    Args:
        context: context parallel ranks.
        block_rows: as ``--cp-block-rows``, of whole sequences.
        tensor: tensor parallel ranks.
        everyone: context times tensor parallel ranks where sequence parallelism splits a context parallel
            rank's rows; None: every tensor parallel rank has them all.
        keeps: whether gathered keys stay in memory until backward.
    """

    def __init__(
        self,
        context: ProcessGroup,
        block_rows: int,
        tensor: ProcessGroup,
        everyone: ProcessGroup | None,
        keeps: bool,
    ) -> None:
        self._whole = KeyGather(context, Zigzag(context.size(), block_rows))
        self.strategy, self.keeps = self._whole, keeps
        self._tensor, self._everyone = tensor, everyone
        self._pending: list[GatheredRows] = []
        self._freed: list[GatheredRows] = []

    @property
    def ranks(self) -> int:
        """Context parallel size."""
        return self.strategy.ranks

    @property
    def is_on_its_way(self) -> bool:
        """Return whether a key was handed over that nobody has taken yet."""
        return bool(self._pending)

    def share(self, layout: Layout | None) -> None:
        """Take this layout of rows from now on; None: that of whole sequences."""
        self.strategy = self._whole if layout is None else KeyGather(self._whole.group, layout)

    @property
    def parts(self) -> int:
        """Tensor parallel ranks that each have a part of this context parallel rank's rows, or 1."""
        return 1 if self._everyone is None else self._tensor.size()

    def own_part(self, rows: Tensor) -> Tensor:
        """Return this tensor parallel rank's part of the context parallel rank's rows."""
        return rows.chunk(self.parts)[self._tensor.rank()] if self.parts > 1 else rows

    def ends(self, rows: int, device: torch.device) -> Tensor:
        """Return, for each of this rank's queries, one past the last visible key: ``[rows]`` int32."""
        return _ends(self.strategy.layout, self.strategy.rank, rows, device)

    def runs(self, rows: int) -> list[tuple[int, int, int, int]]:
        """List runs of neighbours in this rank's rows: first row, end, first and one past the last key."""
        ends = self.strategy.positions(rows) + 1
        breaks = (ends.diff() != 1).nonzero().flatten() + 1
        bounds = [0, *breaks.tolist(), rows]
        return [(first, end, 0, int(ends[end - 1])) for first, end in pairwise(bounds)]

    def gather(self, local: Tensor, is_replicated: bool = False) -> GatheredRows:
        """Start to gather the whole sequence's rows.

        Args:
            local: ``[rows, ...]``, a part of them under sequence parallelism.
            is_replicated: whether tensor parallel ranks compute the same from what was gathered, so that
                their gradients are one gradient; otherwise each has that of its own heads.
        """
        group = self.strategy.group if self._everyone is None else self._everyone
        members = self.strategy.members(local.size(0) * group.size(), group)
        if not (is_replicated and self.parts > 1):
            return GatheredRows(local, members)
        return GatheredRows(local, members, members.part(self.strategy.group, self._tensor.rank()))

    def hand_over(self, *parts: Tensor) -> Tensor:
        """Start to gather the layer's key, in one part or two, and leave it for its core attention.

        Args:
            *parts: ``[rows, b, 1, dim]`` each, as :meth:`gather` takes them.

        Returns:
            The argument of the core attention in the key's place, if the key is in one part.
        """
        self._pending = [self.gather(part) for part in parts]
        return self._pending[0].started

    def take(self) -> list[GatheredRows]:
        """Return the parts of the key that was handed over, none if somebody has taken it."""
        pending, self._pending = self._pending, []
        return pending

    def free(self, out: Tensor, gathered: list[GatheredRows]) -> Tensor:
        """Free what was gathered until backward; returns what is used in place of ``out``.

        A layer that is recomputed in backward keeps it: its own backward comes next.
        """
        in_backward = _graph_task_id() != -1
        if self.keeps or in_backward or not out.requires_grad or not gathered:
            return out
        self._freed = gathered
        return freed_until_backward(out, gathered)

    def start_again_with(self, output: Tensor) -> None:
        """Gather what was freed as soon as the gradient of ``output`` is known, behind the backward of what
        lies between.
        """
        gathered, self._freed = self._freed, []
        if not gathered or not output.requires_grad:
            return

        def start(gradient: Tensor) -> None:
            for one in gathered:
                one.start_again()

        output.register_hook(start)


@lru_cache(maxsize=LATEST)
@torch.inference_mode(False)  # what an evaluation finds first, training uses as well
def _ends(layout: Layout, rank: int, rows: int, device: torch.device) -> Tensor:
    """Make the ends that all layers of a rank share."""
    return (layout.rows_of_rank(rank, rows * layout.ranks) + 1).to(device, torch.int32)


def key_exchange(
    attention: Any, options: Options, megatron: Megatron, documents: PackRows | None = None
) -> KeyExchange | None:
    """Return the layer's key exchange, created on first use; None without context parallelism.

    Args:
        attention: a ``DSAttention``, Megatron's or ours.
        options: say which rows ranks have, and whether gathered keys stay.
        megatron: the attention's Megatron.
        documents: that this microbatch's rows belong to; None for whole sequences.
    """
    groups = groups_of(attention)
    if groups.cp.size() == 1:
        return None
    exchange: KeyExchange | None = vars(attention).get(ATTRIBUTE)
    if exchange is None:
        everyone = None
        if attention.config.sequence_parallel and groups.tp.size() > 1:
            everyone = getattr(groups, "tp_cp", None)
            if everyone is None:
                everyone = megatron("core.parallel_state").get_tensor_and_context_parallel_group()
        exchange = KeyExchange(groups.cp, options.cp_block_rows, groups.tp, everyone, options.keep_gathered)
        vars(attention)[ATTRIBUTE] = exchange
    exchange.share(None if documents is None else documents.layout)
    return exchange


def groups_of(attention: Any) -> Any:
    """Return a ``DSAttention``'s process groups.

    An attention of 0.19 holds them; its indexer may be missing, or replaced for a call by one without them.
    Before, the indexer holds them, and a layer that shares a selection got them when it lost its indexer.
    """
    own = getattr(attention, "pg_collection", None)
    return attention.indexer.pg_collection if own is None else own
