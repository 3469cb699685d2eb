"""Initial weights that do not depend on the layout: each rank takes its part of the same whole tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch

_SPREAD = 0.02


@torch.no_grad()
def fill(chunks: Sequence[Any]) -> None:
    """Draw every matrix anew, seeded by its checkpoint key; vectors keep Megatron's values.

    Args:
        chunks: this rank's model chunks, before the optimizer exists.
    """
    from dsa_job.model import unwrapped
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    for chunk in chunks:
        state = unwrapped(chunk).sharded_state_dict()
        apply_factories(state)
        for part in nested_values(state):
            if isinstance(part, ShardedTensor) and part.data is not None and part.data.dim() > 1:
                part.data.copy_(_part_of_whole(part))


def _part_of_whole(part: Any) -> torch.Tensor:
    """Return this rank's part of a matrix, fp32 on the host."""
    generator = torch.Generator().manual_seed(crc32(part.key.encode()))
    whole = torch.randn(part.global_shape, generator=generator) * _SPREAD
    ahead = part.prepend_axis_num  # leading axes, for example layer and expert
    sizes = (1,) * ahead + tuple(part.local_shape)
    places = tuple(
        slice(offset, offset + size) for offset, size in zip(part.global_offset, sizes, strict=True)
    )
    return whole[places].reshape(part.local_shape)
