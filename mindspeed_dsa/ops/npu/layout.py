"""How torch_npu's operators are given the keys that a row sees.

They know two forms of rows, both causal from the lower right (``sparse_mode=3``):

* BSND, ``[batch, length, heads, dim]``: row ``t`` of ``S1`` sees keys ``0 .. t + S2 - S1`` of ``S2``.
* TND, ``[tokens, heads, dim]`` with prefix sums of the lengths of sequences: the same in each sequence, and
  key indices count from the start of the sequence.

An operator takes ``min(topk, visible keys)`` entries of a row of indices and does not look whether they are
-1. A row that lists fewer keys than that would be computed from whatever lies in memory, so it is refused.

Which keys rows see the host mostly knows (:class:`mindspeed_dsa.ops.row_ranges.RowForm`): a layout made of
that costs nothing. Otherwise it is read from the device, which the host then waits for. What a tensor holds
is not remembered with the tensor: collectives, ``.data`` and ``.numpy()`` change it without a trace. A call
finds its layout once and hands it on, to its own backward too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_dsa.ops import checks
from mindspeed_dsa.ops.checks import names_key, require
from mindspeed_dsa.ops.row_ranges import Ranges, RowForm
from mindspeed_dsa.platforms.host_pool import upload

_BEHIND_ALL = 2**31 - 1


@dataclass(frozen=True)
class Layout:
    """The form in which a call's tensors, ``[batch, length, ...]`` here, go to an operator."""

    batch: int
    query_length: int
    key_length: int
    sequences: tuple[int, ...] | None
    """Lengths of the packed sequences of the whole batch, one after the other (TND), or None (BSND)."""
    device: torch.device

    @property
    def name(self) -> str:
        """Return the operators' name of the layout."""
        return "BSND" if self.sequences is None else "TND"

    @property
    def shortest(self) -> int:
        """Keys of the sequence that has fewest."""
        return self.key_length if self.sequences is None else min(self.sequences)

    @cached_property
    def prefix_sums(self) -> list[int] | None:
        """Ends of the sequences, as the loss operators want them: no leading zero; None for BSND."""
        if self.sequences is None:
            return None
        return torch.tensor(self.sequences).cumsum(0).tolist()

    @cached_property
    def query_lengths(self) -> Tensor:
        """Return lengths for operators other than the losses: int32, prefix sums (TND) or lengths (BSND)."""
        return self._lengths(self.query_length)

    @cached_property
    def key_lengths(self) -> Tensor:
        """The same for keys."""
        return self._lengths(self.key_length)

    @cached_property
    def _offsets(self) -> Tensor:
        """``[tokens, 1]`` int32: where the sequence of each token begins in its row of the batch."""
        assert self.sequences is not None
        lengths = torch.tensor(self.sequences)
        begins = (lengths.cumsum(0) - lengths) % self.query_length
        return upload(begins.repeat_interleave(lengths).to(torch.int32), self.device)[:, None]

    def _lengths(self, length: int) -> Tensor:
        if self.prefix_sums is None:
            return torch.full((self.batch,), length, dtype=torch.int32, device=self.device)
        return upload(torch.tensor(self.prefix_sums, dtype=torch.int32), self.device)

    def pack(self, tensor: Tensor) -> Tensor:
        """``[batch, length, ...]`` as the operators want it, contiguous."""
        return (tensor if self.sequences is None else tensor.flatten(0, 1)).contiguous()

    def unpack(self, tensor: Tensor) -> Tensor:
        """The inverse of :meth:`pack`."""
        return tensor if self.sequences is None else tensor.unflatten(0, (self.batch, -1))

    def pack_heads_first(self, tensor: Tensor) -> Tensor:
        """``[batch, length, heads]`` to ``[batch, heads, length, 1]`` or ``[heads, tokens, 1]``."""
        packed = tensor if self.sequences is None else tensor.flatten(0, 1)
        return packed.transpose(-1, -2)[..., None].contiguous()

    def pack_statistics(self, tensor: Tensor) -> Tensor:
        """``[batch, length, heads]`` to ``[batch, 1, length, heads]`` or ``[1, tokens, heads]``."""
        packed = tensor if self.sequences is None else tensor.flatten(0, 1)
        return packed.unsqueeze(-3).contiguous()

    def unpack_statistics(self, tensor: Tensor) -> Tensor:
        """The inverse of :meth:`pack_statistics`."""
        return self.unpack(tensor.squeeze(-3))

    def pack_indices(self, topk_indices: Tensor) -> Tensor:
        """``[batch, length, topk]`` to what the operators count from: int32, still without a head axis."""
        outside = ~names_key(topk_indices, self.key_length)
        packed = self.pack(topk_indices.masked_fill(outside, -1).to(torch.int32))
        return packed if self.sequences is None else torch.where(packed < 0, packed, packed - self._offsets)

    def pack_widened(self, topk_indices: Tensor, step: int) -> Tensor:
        """The same with a head axis, as wide as the next multiple of ``step``.

        Entries may be added only where every visible key is listed: an operator takes as many entries as
        there are visible keys, so that it does not reach the added ones.
        """
        packed = self.pack_indices(topk_indices)
        missing = -packed.shape[-1] % step
        return F.pad(packed, (0, missing), value=-1).unsqueeze(-2).contiguous()

    def unpack_indices(self, packed: Tensor) -> Tensor:
        """The inverse of :meth:`pack_indices`."""
        if self.sequences is not None:
            packed = torch.where(packed < 0, packed, packed + self._offsets)
        return self.unpack(packed)


@lru_cache(maxsize=16)
def layout_of_form(
    batch: int, query_length: int, key_length: int, form: RowForm, device: torch.device
) -> Layout:
    """The layout of rows of this form, one for all layers: what it brings to the device it brings once."""
    sequences = form.sequences
    if sequences == (query_length,) * batch:
        sequences = None
    return Layout(batch, query_length, key_length, sequences, device)


def layout_of_selection(
    operator: str, topk_indices: Tensor, key_length: int, form: RowForm | None
) -> Layout | str:
    """The layout of rows that list their keys in ``topk_indices``, or why there is none.

    Args:
        operator: who to name in an error.
        topk_indices: ``[batch, query_length, topk]``, valid entries first.
        key_length: number of keys.
        form: of rows that list as many keys as they see, at most ``topk``; with debug checks on the indices
            are read and held against it. None: they are read, see :func:`layout_of_indices`.

    Raises:
        ValueError: the form is not that of these rows.
    """
    if form is None:
        return layout_of_indices(topk_indices, key_length)
    batch, length, _ = topk_indices.shape
    form.check(operator, batch, length, key_length)
    layout = layout_of_form(batch, length, key_length, form, topk_indices.device)
    if checks.enabled():
        found = layout_of_indices(topk_indices, key_length)
        require(
            found == layout,
            operator,
            f"topk_indices do not list what rows of the form that came with them see, {form}",
        )
    return layout


def layout_of_ranges(ranges: Ranges, key_length: int) -> Layout | str:
    """The layout of rows that see these ranges, or a sentence that says why there is none.

    Reads them from the device unless the host knows their form.

    Args:
        ranges: ``[batch, query_length]`` each.
        key_length: number of keys.
    """
    starts, ends, _, form = ranges
    batch, length = ends.shape
    if form is not None:
        return layout_of_form(batch, length, key_length, form, ends.device)
    layout: Layout | None = None
    begin, end = torch.stack([starts, ends]).cpu()
    position = torch.arange(length, dtype=torch.int32)
    if (begin == 0).all() and _ends_at_last_key(end, position, key_length):
        layout = Layout(batch, length, key_length, None, ends.device)
    elif length == key_length and (end == position + 1).all():
        layout = _packed(begin == position, begin, ends.device)
    if layout is None:
        return (
            "torch_npu's operators see causal rows that end at the last key, or whole sequences packed one "
            "after the other; starts and ends describe other rows"
        )
    return layout


def layout_of_indices(topk_indices: Tensor, key_length: int) -> Layout | str:
    """The layout under which each row of ``topk_indices`` lists as many keys as an operator takes.

    A few passes over the indices on the device, then one wait for four numbers per row.

    Args:
        topk_indices: ``[batch, query_length, topk]``, valid entries first.
        key_length: number of keys.

    Returns:
        The layout, or a sentence that says why there is none.
    """
    batch, length, topk = topk_indices.shape
    valid = names_key(topk_indices, key_length)
    counts = valid.sum(dim=-1)
    slot = torch.arange(topk, device=topk_indices.device)
    first_come = (valid == (slot < counts[..., None])).all(dim=-1)
    lowest = topk_indices.masked_fill(~valid, _BEHIND_ALL).amin(dim=-1)
    highest = topk_indices.masked_fill(~valid, -1).amax(dim=-1)
    facts = torch.stack([fact.to(torch.int32) for fact in (counts, first_come, lowest, highest)]).cpu()
    counts, first_come, lowest, highest = facts
    position = torch.arange(length)
    shift = key_length - length
    layout: Layout | None = None
    if first_come.all() and shift >= 0:
        device = topk_indices.device
        seen = position + shift + 1
        if (counts == seen.clamp_max(topk)).all() and (highest < seen).all():
            layout = Layout(batch, length, key_length, None, device)
        elif shift == 0 and (highest <= position).all():
            begins = counts == 1
            begin = torch.where(begins, position, 0).cummax(dim=-1).values
            if (counts == (position - begin + 1).clamp_max(topk)).all() and (lowest >= begin).all():
                layout = _packed(begins, begin, device)
    if layout is None:
        return (
            "torch_npu's operators take as many entries of a row of topk_indices as it sees keys, at most "
            "topk, in causal rows that end at the last key or in sequences packed one after the other; some "
            "row lists another number of keys"
        )
    return layout


def _ends_at_last_key(ends: Tensor, position: Tensor, key_length: int) -> bool:
    shift = key_length - ends.shape[1]
    return shift >= 0 and bool((ends == position + shift + 1).all())


def _packed(begins: Tensor, begin: Tensor, device: torch.device) -> Layout | None:
    """Sequences that begin in the marked rows, if every row belongs to the last one that began.

    Args:
        begins: ``[batch, length]`` bool.
        begin: ``[batch, length]``, where the sequence of a row is said to begin.
        device: where the tensors of the call are.
    """
    batch, length = begins.shape
    position = torch.arange(length)
    if not begins[:, 0].all() or not (torch.where(begins, position, 0).cummax(-1).values == begin).all():
        return None
    bounds = [*begins.flatten().nonzero().flatten().tolist(), batch * length]
    sequences = tuple(after - before for before, after in pairwise(bounds))
    return Layout(batch, length, length, sequences, device)
