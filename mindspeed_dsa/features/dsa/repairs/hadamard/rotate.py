"""The indexer's rotation on any device and in any float type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.hadamard import hadamard_rotation


def rotate_anywhere(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Decorate ``rotate_activation``: a matmul where the CUDA package does not apply."""
    dsa = context.megatron("core.transformer.experimental_attention_variant.dsa")

    def rotate_activation(x: Tensor) -> Any:
        if x.is_cuda and x.dtype == torch.bfloat16 and dsa.hadamard_transform is not None:
            return original(x)
        return hadamard_rotation(x)

    return rotate_activation
