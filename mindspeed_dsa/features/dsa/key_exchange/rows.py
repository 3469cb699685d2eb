"""Patches of Megatron functions that assume two chunks of tokens per rank, for ``--cp-block-rows``.

Does not import Megatron, because it is loaded while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mindspeed_dsa.context_parallel.layout import Zigzag, rolled, split
from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.key_exchange.feature import BlockOptions


def slice_batch(original: Callable[..., Any], context: Context[BlockOptions]) -> Callable[..., Any]:
    """Decorate ``get_batch_on_this_cp_rank`` to slice batches by blocks."""

    def get_batch_on_this_cp_rank(batch: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        # From 0.19 on, context parallelism flags precede the group, and the batch can describe documents.
        if batch.get("cu_seqlens") is not None or any(value is True for value in (*args, *kwargs.values())):
            raise ValueError(
                "cp-block-rows: batches are whole sequences here, and this one has documents or another kind "
                "of context parallelism; pack by --pack-documents, or omit --cp-block-rows"
            )
        groups = [arg for arg in (*args, kwargs.get("cp_group")) if hasattr(arg, "rank")]
        group = _group(context, *groups[:1])
        layout = _layout(context, group)
        for name, value in batch.items():
            if isinstance(value, Tensor) and layout.ranks > 1:
                # masks are [b, 1, s, s], other tensors [b, s]
                batch[name] = split(value, layout, group.rank(), dim=2 if name == "attention_mask" else 1)
        return batch

    return get_batch_on_this_cp_rank


def slice_angles(original: Callable[..., Tensor], context: Context[BlockOptions]) -> Callable[..., Tensor]:
    """Decorate ``get_pos_emb_on_this_cp_rank`` to slice rotary angles by blocks."""

    def get_pos_emb_on_this_cp_rank(pos_emb: Tensor, seq_dim: int, *args: Any, **kwargs: Any) -> Tensor:
        group = _group(context, *args, **kwargs)
        return split(pos_emb, _layout(context, group), group.rank(), seq_dim)

    return get_pos_emb_on_this_cp_rank


def roll_rows(original: Callable[..., Any], context: Context[BlockOptions]) -> Callable[..., Any]:
    """Decorate MTP's ``roll_tensor``, which shifts tokens by one position, to support blocks."""

    def roll_tensor(
        tensor: Tensor,
        shifts: int = -1,
        dims: int = -1,
        cp_group: Any = None,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor]:
        if shifts != -1 or packed_seq_params is not None or any(v is not None for v in others.values()):
            raise ValueError(
                "cp-block-rows: multi-token prediction moves whole sequences by one position here, and "
                f"roll_tensor got shifts={shifts} or packed sequences; omit --cp-block-rows"
            )
        group = _group(context, cp_group)
        result = rolled(tensor, dims % tensor.dim(), group, _layout(context, group))
        # Megatron 0.16 divides a loss by this sum, which is 0 where a rank has masked rows only.
        total = result.sum()
        return result, total.masked_fill(total == 0, 1)

    return roll_tensor


def _group(context: Context[BlockOptions], cp_group: Any = None) -> Any:
    """Return ``cp_group``, or the global group before 0.14, where callers pass none."""
    return (
        context.megatron("core.parallel_state").get_context_parallel_group() if cp_group is None else cp_group
    )


def _layout(context: Context[BlockOptions], group: Any) -> Zigzag:
    return Zigzag(group.size(), context.options.block_rows)
