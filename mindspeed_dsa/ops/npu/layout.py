"""Input layouts of torch_npu's operators (BSND and TND), and detection of the layout of a call.

The operators support two layouts, both with a causal mask aligned to the last query and key
(``sparse_mode=3``):

* BSND, ``[batch, length, heads, dim]``: row ``t`` of ``S1`` sees keys ``0 .. t + S2 - S1`` of ``S2``.
* TND, ``[tokens, heads, dim]`` with prefix sums of the sequence lengths: the same mask within each sequence,
  with key indices counted from the start of the sequence.

An operator reads ``min(topk, visible keys)`` entries of a row of indices, without checking them for -1. A row
that lists fewer keys would be computed from arbitrary memory, so such calls are declined.

If the host knows which keys the rows see (:class:`mindspeed_dsa.ops.row_ranges.RowForm`), the layout follows
without reading a tensor. Otherwise the ranges or indices are read from the device, which takes a
synchronization. The result is not cached per tensor, because collectives, ``.data`` and ``.numpy()`` change
contents without changing the version counter. Each call determines its layout once and keeps it for its
backward.
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

# Larger than every key position.
_BEHIND_ALL = 2**31 - 1


@dataclass(frozen=True)
class Layout:
    """Operator layout of a call, which converts ``[batch, length, ...]`` tensors to and from it."""

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
        """Return the number of keys of the shortest sequence."""
        return self.key_length if self.sequences is None else min(self.sequences)

    @cached_property
    def prefix_sums(self) -> list[int] | None:
        """Return the sequences' ends (without a leading zero) for the loss operators; None for BSND."""
        if self.sequences is None:
            return None
        return torch.tensor(self.sequences).cumsum(0).tolist()

    @cached_property
    def query_lengths(self) -> Tensor:
        """Return int32 query lengths for operators except the losses: prefix sums (TND) or lengths (BSND)."""
        return self._lengths(self.query_length)

    @cached_property
    def key_lengths(self) -> Tensor:
        """Return int32 key lengths, like :attr:`query_lengths`."""
        return self._lengths(self.key_length)

    @cached_property
    def _offsets(self) -> Tensor:
        """Return ``[tokens, 1]`` int32: start of each token's sequence within its row of the batch."""
        assert self.sequences is not None
        lengths = torch.tensor(self.sequences)
        begins = (lengths.cumsum(0) - lengths) % self.query_length  # [sequences]
        return upload(begins.repeat_interleave(lengths).to(torch.int32), self.device)[:, None]

    def _lengths(self, length: int) -> Tensor:
        if self.prefix_sums is None:
            return torch.full((self.batch,), length, dtype=torch.int32, device=self.device)
        return upload(torch.tensor(self.prefix_sums, dtype=torch.int32), self.device)

    def pack(self, tensor: Tensor) -> Tensor:
        """Return ``[batch, length, ...]`` in the operators' layout, contiguous."""
        return (tensor if self.sequences is None else tensor.flatten(0, 1)).contiguous()

    def unpack(self, tensor: Tensor) -> Tensor:
        """Invert :meth:`pack`."""
        return tensor if self.sequences is None else tensor.unflatten(0, (self.batch, -1))

    def pack_heads_first(self, tensor: Tensor) -> Tensor:
        """Return ``[batch, length, heads]`` as ``[batch, heads, length, 1]`` or ``[heads, tokens, 1]``."""
        packed = tensor if self.sequences is None else tensor.flatten(0, 1)
        return packed.transpose(-1, -2)[..., None].contiguous()

    def pack_statistics(self, tensor: Tensor) -> Tensor:
        """Return ``[batch, length, heads]`` as ``[batch, 1, length, heads]`` or ``[1, tokens, heads]``."""
        packed = tensor if self.sequences is None else tensor.flatten(0, 1)
        return packed.unsqueeze(-3).contiguous()

    def unpack_statistics(self, tensor: Tensor) -> Tensor:
        """Invert :meth:`pack_statistics`."""
        return self.unpack(tensor.squeeze(-3))

    def pack_indices(self, topk_indices: Tensor) -> Tensor:
        """Return ``[batch, length, topk]`` indices in the operators' layout: int32, no head axis yet."""
        outside = ~names_key(topk_indices, self.key_length)
        packed = self.pack(topk_indices.masked_fill(outside, -1).to(torch.int32))
        return packed if self.sequences is None else torch.where(packed < 0, packed, packed - self._offsets)

    def pack_widened(self, topk_indices: Tensor, step: int) -> Tensor:
        """Return the packed indices with a head axis, padded to a multiple of ``step`` entries.

        Only valid if every visible key is listed: an operator reads as many entries as there are visible
        keys, so it never reads the padding.
        """
        packed = self.pack_indices(topk_indices)
        missing = -packed.shape[-1] % step
        return F.pad(packed, (0, missing), value=-1).unsqueeze(-2).contiguous()  # [..., 1, topk + missing]

    def unpack_indices(self, packed: Tensor) -> Tensor:
        """Invert :meth:`pack_indices`."""
        if self.sequences is not None:
            packed = torch.where(packed < 0, packed, packed + self._offsets)
        return self.unpack(packed)


@lru_cache(maxsize=16)
def layout_of_form(
    batch: int, query_length: int, key_length: int, form: RowForm, device: torch.device
) -> Layout:
    """Return the layout for a row form; cached, so that all layers share its device tensors."""
    sequences = form.sequences
    # One sequence per row of the batch: BSND.
    if sequences == (query_length,) * batch:
        sequences = None
    return Layout(batch, query_length, key_length, sequences, device)


def layout_of_selection(
    operator: str, topk_indices: Tensor, key_length: int, form: RowForm | None
) -> Layout | str:
    """Return the layout for attention to ``topk_indices``, or why no layout fits.

    Args:
        operator: operator's name in an error.
        topk_indices: ``[batch, query_length, topk]``, valid entries first.
        key_length: number of keys.
        form: host-side description of each row's visible keys. Valid only if every row lists all its visible
            keys up to ``topk``; with debug checks on, the indices are compared with it. None: the layout is
            derived by :func:`layout_of_indices`, which reads the indices.

    Raises:
        ValueError: the form does not match the rows.
    """
    if form is None:
        return layout_of_indices(topk_indices, key_length)
    batch, length, _ = topk_indices.shape
    form.check(operator, batch, length, key_length)
    layout = layout_of_form(batch, length, key_length, form, topk_indices.device)
    if checks.enabled():
        actual = layout_of_indices(topk_indices, key_length)
        require(
            actual == layout,
            operator,
            f"topk_indices do not list what rows of the form that came with them see, {form}",
        )
    return layout


def layout_of_ranges(ranges: Ranges, key_length: int) -> Layout | str:
    """Return the layout for rows with these visible ranges, or why no layout fits.

    Reads the ranges from the device unless the host knows their form.

    Args:
        ranges: ranges with ``[batch, query_length]`` bounds.
        key_length: number of keys.
    """
    starts, ends, _, form = ranges
    batch, length = ends.shape
    if form is not None:
        return layout_of_form(batch, length, key_length, form, ends.device)
    layout: Layout | None = None
    begin, end = torch.stack([starts, ends]).cpu()  # [batch, query_length] each
    position = torch.arange(length, dtype=torch.int32)
    if (begin == 0).all() and _ends_at_last_key(end, position, key_length):
        layout = Layout(batch, length, key_length, None, ends.device)
    # Packed sequences end at their own row, and a row whose range starts at itself starts a sequence.
    elif length == key_length and (end == position + 1).all():
        layout = _packed(begin == position, begin, ends.device)
    if layout is None:
        return (
            "torch_npu's operators see causal rows that end at the last key, or whole sequences packed one "
            "after the other; starts and ends describe other rows"
        )
    return layout


def layout_of_indices(topk_indices: Tensor, key_length: int) -> Layout | str:
    """Return the layout in which an operator reads exactly the keys that each row lists, or why none fits.

    Takes a few passes over the indices on the device, then one synchronization to read four numbers per row.

    Args:
        topk_indices: ``[batch, query_length, topk]``, valid entries first.
        key_length: number of keys.

    Returns:
        The layout, or a sentence that says why there is none.
    """
    batch, length, topk = topk_indices.shape
    valid = names_key(topk_indices, key_length)  # [batch, query_length, topk]
    # [batch, query_length] each
    counts = valid.sum(dim=-1)
    slot = torch.arange(topk, device=topk_indices.device)
    first_come = (valid == (slot < counts[..., None])).all(dim=-1)
    lowest = topk_indices.masked_fill(~valid, _BEHIND_ALL).amin(dim=-1)
    highest = topk_indices.masked_fill(~valid, -1).amax(dim=-1)
    # [4, batch, query_length]
    facts = torch.stack([fact.to(torch.int32) for fact in (counts, first_come, lowest, highest)]).cpu()
    counts, first_come, lowest, highest = facts
    position = torch.arange(length)
    shift = key_length - length
    layout: Layout | None = None
    if first_come.all() and shift >= 0:
        device = topk_indices.device
        seen = position + shift + 1
        # Causal to the last key: each row lists min(topk, visible keys) keys, none beyond its end.
        if (counts == seen.clamp_max(topk)).all() and (highest < seen).all():
            layout = Layout(batch, length, key_length, None, device)
        elif shift == 0 and (highest <= position).all():
            # A row with one key starts a sequence; each row belongs to the last sequence that started.
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
    """Return the layout of sequences that start where ``begins`` is True; None if ``begin`` disagrees.

    Args:
        begins: ``[batch, length]`` bool, whether a sequence starts in a row.
        begin: ``[batch, length]``, expected start of the row's sequence.
        device: device of the call's tensors.
    """
    batch, length = begins.shape
    position = torch.arange(length)
    if not begins[:, 0].all() or not (torch.where(begins, position, 0).cummax(-1).values == begin).all():
        return None
    bounds = [*begins.flatten().nonzero().flatten().tolist(), batch * length]
    sequences = tuple(after - before for before, after in pairwise(bounds))
    return Layout(batch, length, length, sequences, device)
