"""Attention masks of transformers as key ranges per token, without a buffer of size tokens x keys.

Once per forward pass transformers calls the mask function that is registered for an attention implementation,
and passes the result to every layer. Our mask is int32 ``[batch, 1, rows, width]``, where ``rows`` are query
tokens. Its last dimension holds the first visible key, one past the last visible key, and 1 for a token or 0
for padding. The width is 0 instead of 3 for a plain causal mask without padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed_dsa.ops.dsa import RowForm

_CHUNK = 1 << 24
"""Largest number of mask entries that are evaluated at once."""
_HIDDEN = -9e3
"""Threshold of additive masks: lower values hide a key. Users write -10000 (-9984 in bf16), -1e9 or less."""
_WIDTH = 3
"""Width of a range: first key, end, whether it is a token."""


class Rows(NamedTuple):
    """Visible keys of query tokens, for :func:`mindspeed_dsa.ops.dsa.deepseek_sparse_attention`."""

    starts: Tensor | None = None
    """``[batch, rows]`` int32, first visible key; ``None`` if ``form`` is set."""
    ends: Tensor | None = None
    """``[batch, rows]`` int32, one past the last visible key; ``None`` if ``form`` is set."""
    form: RowForm | None = None
    """Plain causal mask that ends at the last key, else ``None``."""
    row_mask: Tensor | None = None
    """``[batch, rows]`` bool, true for tokens; ``None`` without padding."""


def rows_of(mask: Tensor) -> Rows:
    """Convert a mask to key ranges.

    Args:
        mask: ``[batch, 1, rows, width]`` from :func:`ranges_mask`, or a user's ``[batch, 1, rows, keys]``:
            bool with true for visible keys, or floating point to add to scores.

    Raises:
        ValueError: a user's mask differs between heads, changes the scores of visible keys, or makes a token
            see keys that are not contiguous.
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
        ranges = _Found.of(~hidden)
        adds, gaps = _told(((mask[:, 0] != 0) & ~hidden).any(), ranges.gaps.any())
        if adds:
            raise ValueError(
                "mindspeed_dsa: the attention mask adds to the scores of keys that it does not hide; the "
                "operators add nothing: give 0 for visible keys and -10000 or less for others, or "
                "undo() what apply_dsa() did"
            )
        mask = _checked(ranges, gaps)
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
    """Return the key ranges of a forward pass. Replaces ``transformers.masking_utils.sdpa_mask``.

    Args:
        batch_size: number of sequences.
        q_length: number of query tokens per sequence.
        kv_length: number of keys per sequence, including cached ones.
        q_offset: position of the first query token, an int or a tensor.
        kv_offset: position of the first key.
        mask_function: function from batch, head, query and key indices to visibility; default: causal mask.
        attention_mask: ``[batch, kv_length]`` bool, false for padding.
        device: device of the result.
        **kwargs: arguments of other implementations.

    Raises:
        ValueError: a token sees keys that are not contiguous.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    is_causal = mask_function in (None, causal_mask_function)
    tokens, padded = attention_mask, None
    if tokens is not None:
        # Copy both facts to the host at once, so that it waits for the device only once.
        padded = _Found.of(tokens[:, None, :kv_length])
        all_tokens, gaps = _told(tokens.all(), padded.gaps.any())
        if all_tokens:
            tokens = None
        elif is_causal:
            _checked(padded, gaps)
    if is_causal:
        if tokens is None and isinstance(q_offset, int) and kv_length - kv_offset == q_offset + q_length:
            return torch.empty(batch_size, 1, q_length, 0, dtype=torch.int32, device=device)
        # Query token i sees keys up to its own position: keys 0 to i + q_offset - kv_offset.
        ends = torch.arange(q_length, device=device) + (q_offset - kv_offset + 1)
        ranges = torch.stack(
            [torch.zeros_like(ends), ends.clamp(0, kv_length), torch.ones_like(ends)], dim=-1
        )
        ranges = ranges.to(torch.int32).expand(batch_size, -1, -1)
        if tokens is None or padded is None:
            return ranges[:, None]
        # Intersect the causal ranges with the ranges of tokens.
        starts = torch.maximum(ranges[..., 0], padded.ranges[..., 0])
        ends = torch.minimum(ranges[..., 1], padded.ranges[..., 1])
        return torch.stack([starts, ends, _are_tokens(tokens, q_length, q_offset)], dim=-1)[:, None]
    assert mask_function is not None
    # Evaluate the mask in blocks of query tokens: 2**24 entries are 256 tokens of 65,536 keys.
    rows = max(_CHUNK // max(batch_size * kv_length, 1), 1)
    parts = []
    for begin in range(0, q_length, rows):
        # Bool [batch, 1, rows of the block, kv_length].
        visible = sdpa_mask(
            batch_size,
            min(rows, q_length - begin),
            kv_length,
            q_offset + begin,
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
    ranges = _checked(whole)
    if tokens is not None:
        ranges[:, 0, :, 2] = _are_tokens(tokens, q_length, q_offset)
    return ranges


def _are_tokens(tokens: Tensor, rows: int, first: Any) -> Tensor:
    """Return ``[batch, rows]`` int32, 1 for tokens and 0 for padding, from a mask over all positions."""
    position = torch.arange(rows, device=tokens.device) + first
    return tokens.index_select(1, position.clamp_max(tokens.shape[1] - 1)).to(torch.int32)


class _Found(NamedTuple):
    """Key ranges computed from a boolean mask; a mask does not mark query tokens as padding."""

    ranges: Tensor
    """``[batch, rows, 3]`` int32."""
    counts: Tensor
    """``[batch, rows]`` int64, number of visible keys."""
    gaps: Tensor
    """``[batch, rows]`` bool, true if the visible keys are not contiguous."""

    @classmethod
    def of(cls, visible: Tensor) -> _Found:
        """Compute each query token's key range from a bool mask ``[batch, rows, keys]``."""
        counts = visible.sum(-1)
        starts = visible.int().argmax(-1)
        # argmax returns the first maximum: the first visible key, and in the flipped mask the last one.
        last = visible.shape[-1] - 1 - visible.flip(-1).int().argmax(-1)
        ranges = torch.stack([starts, starts + counts, torch.ones_like(counts)], dim=-1).to(torch.int32)
        return cls(ranges, counts, (counts > 0) & (last - starts + 1 != counts))


def _told(*facts: Tensor) -> list[bool]:
    """Return the values of scalar bool tensors, copied to the host together so that it waits only once."""
    return [bool(fact) for fact in torch.stack(facts).tolist()]


def _checked(found: _Found, has_gaps: bool | None = None) -> Tensor:
    """Return the ranges as ``[batch, 1, rows, 3]`` int32, after a check for gaps.

    Args:
        found: ranges of a mask.
        has_gaps: result of the check, if already known on the host.

    Raises:
        ValueError: a token sees keys that are not contiguous.
    """
    if bool(found.gaps.any()) if has_gaps is None else has_gaps:
        batch, row = found.gaps.nonzero()[0].tolist()
        raise ValueError(
            f"mindspeed_dsa: row {row} of sequence {batch} sees {int(found.counts[batch, row])} keys that "
            "are not one behind the other; the operators take one range for each row, such as causal rows, "
            "padding at either end and packed documents. Put padding at an end, or undo() apply_dsa()"
        )
    return found.ranges[:, None]
