"""Tensors that have lost their numbers.

Megatron and the optimizer know each master weight by its tensor, as a key of the optimizer's state for
instance, so the tensors stay when their numbers go elsewhere. They become views, of the right shape, of a
single NaN: reading gives NaN, and writing raises torch's error, instead of going unnoticed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mindspeed_dsa.parallel.local_shards import local_of


class Voids:
    """The single NaN of each device."""

    def __init__(self) -> None:
        self._nothing: dict[torch.device, Tensor] = {}

    def void(self, tensor: Tensor) -> None:
        """Free the memory of a float32 tensor, or of this rank's piece; it keeps its shape and device."""
        tensor = local_of(tensor)
        if tensor.device not in self._nothing:
            self._nothing[tensor.device] = torch.full((), math.nan, dtype=torch.float32, device=tensor.device)
        tensor.data = self._nothing[tensor.device].expand(tensor.shape)
