"""Orthonormal Walsh-Hadamard transform in natural (Sylvester) order, as a matmul."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=8)
def sylvester_matrix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The symmetric ``[size, size]`` matrix of +1 and -1 with ``H[i, j] = (-1) ** popcount(i & j)``.

    Raises:
        ValueError: ``size`` is not a power of two.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(
            f"the Hadamard rotation needs a power of two, but the indexer's head size is {size}; "
            "set dsa_indexer_head_dim to 64 or 128"
        )
    # The matrix is cached: an inference tensor created under inference_mode could not be used in training
    # later.
    with torch.inference_mode(False):
        matrix = torch.ones(1, 1, dtype=dtype, device=device)
        while matrix.size(0) < size:
            top = torch.cat([matrix, matrix], dim=1)
            matrix = torch.cat([top, torch.cat([matrix, -matrix], dim=1)], dim=0)
        return matrix


def hadamard_rotation(activation: Tensor) -> Tensor:
    """Multiply the last dimension by the orthonormal Hadamard matrix.

    Sums in fp32 (fp64 for fp64 input) and rounds once, at the end, to the input's dtype. Being
    orthonormal it leaves ``query @ key`` unchanged up to rounding; it is its own inverse.

    Args:
        activation: ``[..., size]``, ``size`` a power of two; any floating dtype.

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
