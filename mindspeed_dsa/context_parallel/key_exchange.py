"""Exchange of the keys of one layer's sparse attention between context parallel ranks.

Queries stay on their ranks. Only two small tensors are all-gathered: the latent key, which all heads share,
and the indexer's key.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_dsa.context_parallel.gather import LATEST, GatheredRows, KeyGather, freed_until_backward
from mindspeed_dsa.context_parallel.layout import Layout
from mindspeed_dsa.patches import versions

_graph_task_id = versions.private("torch._C:_current_graph_task_id", "DSA's context parallelism")


class KeyExchange:
    """State of the exchange of one DSA layer's keys: process groups, layout, and all-gathers in flight.

    Args:
        context: process group of context parallel ranks.
        layout: assignment of the tokens of whole sequences to ranks.
        tensor: process group of tensor parallel ranks, needed if ``everyone`` is given.
        everyone: joint process group of context and tensor parallel ranks, for sequence parallelism. None:
            every tensor parallel rank has all tokens of its context parallel rank.
        keeps: whether gathered keys stay in memory until backward, instead of being gathered again.
    """

    def __init__(
        self,
        context: ProcessGroup,
        layout: Layout,
        tensor: ProcessGroup | None = None,
        everyone: ProcessGroup | None = None,
        keeps: bool = False,
    ) -> None:
        self._whole = KeyGather(context, layout)
        self.strategy, self.keeps = self._whole, keeps
        self._tensor = context if tensor is None else tensor
        self._everyone = everyone
        self._pending: list[GatheredRows] = []
        self._freed: list[GatheredRows] = []

    @property
    def ranks(self) -> int:
        """Context parallel size."""
        return self.strategy.ranks

    @property
    def is_on_its_way(self) -> bool:
        """Whether :meth:`hand_over` has started an all-gather that :meth:`take` has not returned yet."""
        return bool(self._pending)

    def share(self, layout: Layout | None) -> None:
        """Set the layout of tokens for the next calls; None: the layout for whole sequences."""
        self.strategy = self._whole if layout is None else KeyGather(self._whole.group, layout)

    @property
    def parts(self) -> int:
        """Number of tensor parallel ranks among which this context parallel rank's tokens are split."""
        return 1 if self._everyone is None else self._tensor.size()

    def own_part(self, rows: Tensor) -> Tensor:
        """Slice this tensor parallel rank's shard of the context parallel rank's tokens (dimension 0)."""
        return rows.chunk(self.parts)[self._tensor.rank()] if self.parts > 1 else rows

    def ends(self, rows: int, device: torch.device) -> Tensor:
        """Return the end of the visible keys for each of this rank's queries: ``[rows]`` int32."""
        return _ends(self.strategy.layout, self.strategy.rank, rows, device)

    def runs(self, rows: int) -> list[tuple[int, int, int, int]]:
        """Return runs of consecutive tokens: first token, end, first key, end of the last token's keys."""
        return _runs(self.strategy.layout, self.strategy.rank, rows)

    def gather(self, local: Tensor, is_replicated: bool = False) -> GatheredRows:
        """Start to all-gather a tensor over the whole sequence.

        Args:
            local: this rank's tokens ``[rows, ...]``, a shard of them under sequence parallelism.
            is_replicated: whether all tensor parallel ranks use the result in the same computation, so that
                each has the full gradient. Otherwise each rank uses it for its own heads, and gradients are
                summed over ranks.
        """
        group = self.strategy.group if self._everyone is None else self._everyone
        members = self.strategy.members(local.size(0) * group.size(), group)
        if not (is_replicated and self.parts > 1):
            return GatheredRows(local, members, is_freed=not self.keeps)
        # Gradients are summed over context parallel ranks only, as tensor parallel ranks have equal ones.
        own = members.part(self.strategy.group, self._tensor.rank())
        return GatheredRows(local, members, own, is_freed=not self.keeps)

    def hand_over(self, *parts: Tensor) -> Tensor:
        """Start to all-gather the layer's key. The core attention gets it with :meth:`take`.

        Args:
            *parts: key ``[rows, b, 1, dim]`` in one tensor, or latent and rotary dimensions in two; see
                :meth:`gather`.

        Returns:
            Placeholder to pass as the core attention's key, if the key is in one tensor.
        """
        self._pending = [self.gather(part) for part in parts]
        return self._pending[0].started

    def take(self) -> list[GatheredRows]:
        """Return the all-gathers started by :meth:`hand_over`; empty if they were taken already."""
        pending, self._pending = self._pending, []
        return pending

    def free(self, out: Tensor, gathered: list[GatheredRows]) -> Tensor:
        """Free gathered tensors until backward, and return the output to use in place of ``out``."""
        # != -1: autograd is running, so this is a recomputation. Its backward comes next: keep the tensors.
        in_backward = _graph_task_id() != -1
        if self.keeps or in_backward or not out.requires_grad or not gathered:
            return out
        self._freed = gathered
        return freed_until_backward(out, gathered)

    def start_again_with(self, output: Tensor) -> None:
        """Gather freed tensors again as soon as the gradient of ``output`` is available.

        The all-gather then overlaps with the backward of the layers between ``output`` and the core
        attention.
        """
        gathered, self._freed = self._freed, []
        if not gathered or not output.requires_grad:
            return

        def start(gradient: Tensor) -> None:
            for one in gathered:
                one.start_again()

        output.register_hook(start)


@lru_cache(maxsize=LATEST)
@torch.inference_mode(False)  # a cached tensor may be created in evaluation and used in training
def _ends(layout: Layout, rank: int, rows: int, device: torch.device) -> Tensor:
    """Return the end of each query's visible keys; cached, because all layers of a rank have the same."""
    return (layout.rows_of_rank(rank, rows * layout.ranks) + 1).to(device, torch.int32)


@lru_cache(maxsize=LATEST)
def _runs(layout: Layout, rank: int, rows: int) -> list[tuple[int, int, int, int]]:
    # Rank 0 of 2 has positions 0 1 6 7: ends 1 2 7 8, a break at row 2: (0, 2, 0, 2), (2, 4, 0, 8).
    ends = layout.rows_of_rank(rank, rows * layout.ranks) + 1
    breaks = (ends.diff() != 1).nonzero().flatten() + 1
    bounds = [0, *breaks.tolist(), rows]
    return [(first, end, 0, int(ends[end - 1])) for first, end in pairwise(bounds)]
