"""Masks of transformers as ranges of keys: what a row sees, without a buffer of rows times keys.

transformers asks the function that is registered for an attention implementation for a mask, once in a
forward pass of a model, and hands it to every layer as it is. Ours is int32, ``[batch, 1, rows, width]``: the
last axis holds, for each row, its first visible key, the one past its last, and 1 if the row is a token
rather than padding; of width 0 where every row is a token and causal up to the last key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed_dsa.ops.dsa import RowForm

_CHUNK = 1 << 24
"""Entries of a mask that are evaluated at once."""
_HIDDEN = -9e3
"""Added to a score, it hides a key: users write -10000 (-9984 in bf16), -1e9 and a dtype's least."""
_WIDTH = 3
"""Of ranges: first, end, whether the row is a token."""


class Rows(NamedTuple):
    """Keys that rows see, as :func:`mindspeed_dsa.ops.dsa.deepseek_sparse_attention` takes it."""

    starts: Tensor | None = None
    """``[batch, rows]`` int32, or None with a form."""
    ends: Tensor | None = None
    """Likewise."""
    form: RowForm | None = None
    """Of rows that are causal up to the last key; else None."""
    row_mask: Tensor | None = None
    """``[batch, rows]`` bool, true for tokens; None where every row is one."""


def rows_of(mask: Tensor) -> Rows:
    """Return what a mask says.

    Args:
        mask: ``[batch, 1, rows, width]`` as :func:`ranges_mask` made it, or of the user: ``[batch, 1, rows,
            keys]``, bool with true for visible keys, or floating point and added to scores.

    Raises:
        ValueError: a mask of the user's is another for each head, adds to the scores of visible keys, or has
            a row that sees keys that are not one behind the other.
    """
    if mask.shape[1] != 1:
        raise ValueError(
            f"mindspeed_dsa: the attention mask has shape {tuple(mask.shape)}, a mask for each head, and all "
            "heads attend to the keys that the indexer selects; give [batch, 1, rows, keys]"
        )
    if mask.dtype == torch.bool:
        mask = _checked(_Found.of(mask[:, 0]))
    elif mask.is_floating_point():
        hidden = mask[:, 0] <= _HIDDEN
        found = _Found.of(~hidden)
        adds, gaps = _told(((mask[:, 0] != 0) & ~hidden).any(), found.gaps.any())
        if adds:
            raise ValueError(
                "mindspeed_dsa: the attention mask adds to the scores of keys that it does not hide; the "
                "operators add nothing: give 0 for visible keys and -10000 or less for others, or "
                "undo() what apply_dsa() did"
            )
        mask = _checked(found, gaps)
    elif mask.dtype != torch.int32 or mask.shape[-1] not in (0, _WIDTH):
        raise ValueError(
            f"mindspeed_dsa: the attention mask of four axes is of {mask.dtype}; give bool, true for visible "
            "keys, or floating point to add to scores"
        )
    if mask.shape[-1] == 0:
        return Rows(form=RowForm())
    starts, ends, counts = (part[:, 0] for part in mask.unbind(-1))
    return Rows(starts, ends, row_mask=counts.bool())


def ranges_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor:
    """Return the ranges of a forward pass, in the place of ``transformers.masking_utils.sdpa_mask``.

    Args:
        batch_size: sequences.
        q_length: rows of each.
        kv_length: keys of each, those of a cache included.
        q_offset: position of the first row, an int or a tensor.
        kv_offset: position of the first key.
        mask_function: which positions see which, of indices that broadcast; default causal.
        attention_mask: ``[batch, kv_length]`` bool, false for padding.
        device: where the result lives.
        **kwargs: what other implementations take.

    Raises:
        ValueError: a row sees keys that are not one behind the other.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    is_causal = mask_function in (None, causal_mask_function)
    tokens, padded = attention_mask, None
    if tokens is not None:
        # One wait for the device, whatever is asked of it.
        padded = _Found.of(tokens[:, None, :kv_length])
        all_tokens, gaps = _told(tokens.all(), padded.gaps.any())
        if all_tokens:
            tokens = None
        elif is_causal:
            _checked(padded, gaps)
    if is_causal:
        if tokens is None and isinstance(q_offset, int) and kv_length - kv_offset == q_offset + q_length:
            return torch.empty(batch_size, 1, q_length, 0, dtype=torch.int32, device=device)
        ends = torch.arange(q_length, device=device) + (q_offset - kv_offset + 1)
        found = torch.stack([torch.zeros_like(ends), ends.clamp(0, kv_length), torch.ones_like(ends)], dim=-1)
        found = found.to(torch.int32).expand(batch_size, -1, -1)
        if tokens is None or padded is None:
            return found[:, None]
        starts = torch.maximum(found[..., 0], padded.ranges[..., 0])
        ends = torch.minimum(found[..., 1], padded.ranges[..., 1])
        return torch.stack([starts, ends, _are_tokens(tokens, q_length, q_offset)], dim=-1)[:, None]
    assert mask_function is not None
    rows = max(_CHUNK // max(batch_size * kv_length, 1), 1)
    parts = []
    for at in range(0, q_length, rows):
        visible = sdpa_mask(
            batch_size,
            min(rows, q_length - at),
            kv_length,
            q_offset + at,
            kv_offset,
            mask_function,
            attention_mask,
            allow_is_causal_skip=False,
            use_vmap=kwargs.get("use_vmap", False),
            device=device,
        )
        assert visible is not None, "it skips causal masks alone, when allowed to"
        parts.append(_Found.of(visible[:, 0]))
    whole = _Found(*(torch.cat(part, dim=1) for part in zip(*parts, strict=True)))
    found = _checked(whole)
    if tokens is not None:
        found[:, 0, :, 2] = _are_tokens(tokens, q_length, q_offset)
    return found


def _are_tokens(tokens: Tensor, rows: int, first: Any) -> Tensor:
    """Return ``[batch, rows]`` int32: 1 for tokens, of a mask over all positions so far."""
    position = torch.arange(rows, device=tokens.device) + first
    return tokens.index_select(1, position.clamp_max(tokens.shape[1] - 1)).to(torch.int32)


class _Found(NamedTuple):
    """Ranges of keys that rows see, every row a token, and whether they are all that the rows see."""

    ranges: Tensor
    """``[batch, rows, 3]`` int32."""
    counts: Tensor
    """``[batch, rows]`` int64, keys that the row sees."""
    gaps: Tensor
    """``[batch, rows]`` bool, true where they are not one behind the other."""

    @classmethod
    def of(cls, visible: Tensor) -> _Found:
        """Find them in ``[batch, rows, keys]`` bool."""
        counts = visible.sum(-1)
        starts = visible.int().argmax(-1)
        last = visible.shape[-1] - 1 - visible.flip(-1).int().argmax(-1)
        ranges = torch.stack([starts, starts + counts, torch.ones_like(counts)], dim=-1).to(torch.int32)
        return cls(ranges, counts, (counts > 0) & (last - starts + 1 != counts))


def _told(*facts: Tensor) -> list[bool]:
    """Return what tensors ``[]`` of bool say; the host waits once."""
    return [bool(fact) for fact in torch.stack(facts).tolist()]


def _checked(found: _Found, has_gaps: bool | None = None) -> Tensor:
    """Return ranges ``[batch, 1, rows, 3]`` int32.

    Args:
        found: ranges of a mask.
        has_gaps: answer of its gaps, if it is known already.

    Raises:
        ValueError: a row sees keys that are not one behind the other.
    """
    if bool(found.gaps.any()) if has_gaps is None else has_gaps:
        batch, row = found.gaps.nonzero()[0].tolist()
        raise ValueError(
            f"mindspeed_dsa: row {row} of sequence {batch} sees {int(found.counts[batch, row])} keys that "
            "are not one behind the other; the operators take one range for each row, such as causal rows, "
            "padding at either end and packed documents. Put padding at an end, or undo() apply_dsa()"
        )
    return found.ranges[:, None]
