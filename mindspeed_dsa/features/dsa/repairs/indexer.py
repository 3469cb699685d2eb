"""Hadamard rotation of the indexer's queries and keys: the Walsh-Hadamard transform as a matmul.

Does not import Megatron, because it is loaded while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context


@lru_cache(maxsize=8)
def sylvester_matrix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the Hadamard matrix ``[size, size]`` of +1 and -1: ``H[i, j] = (-1) ** popcount(i & j)``.

    Raises:
        ValueError: ``size`` is not a power of two.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(
            f"the Hadamard rotation needs a power of two, but the indexer's head size is {size}; "
            "set dsa_indexer_head_dim to 64 or 128"
        )
    # Cached: an inference tensor, created under inference_mode, could not be used in training later.
    with torch.inference_mode(False):
        matrix = torch.ones(1, 1, dtype=dtype, device=device)
        while matrix.size(0) < size:
            # Sylvester's construction: [[H, H], [H, -H]]
            top = torch.cat([matrix, matrix], dim=1)
            matrix = torch.cat([top, torch.cat([matrix, -matrix], dim=1)], dim=0)
        return matrix


def hadamard_rotation(activation: Tensor) -> Tensor:
    """Multiply the last dimension by the orthonormal Hadamard matrix.

    Accumulates in fp32 (fp64 for fp64 input) and rounds once, to the input's dtype. The matrix is orthonormal
    and its own inverse, so ``query @ key`` is unchanged up to rounding.

    Args:
        activation: tensor ``[..., size]`` in any floating dtype; ``size`` must be a power of two.

    Returns:
        Tensor of the same shape and dtype.

    Raises:
        ValueError: ``size`` is not a power of two.
    """
    size = activation.size(-1)
    dtype = torch.promote_types(activation.dtype, torch.float32)
    matrix = sylvester_matrix(size, dtype, activation.device)
    rotated: Tensor = activation.to(dtype) @ matrix * size**-0.5
    return rotated.to(activation.dtype)


def rotate_anywhere(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Decorate ``rotate_activation`` to use a matmul if the CUDA package does not support the input."""
    dsa = context.megatron("core.transformer.experimental_attention_variant.dsa")

    def rotate_activation(x: Tensor) -> Any:
        if x.is_cuda and x.dtype == torch.bfloat16 and dsa.hadamard_transform is not None:
            return original(x)
        return hadamard_rotation(x)

    return rotate_activation
