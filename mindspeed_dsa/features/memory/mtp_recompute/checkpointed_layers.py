"""Fixes for recomputed multi-token prediction layers: only tensors are passed to the checkpoint function.

Reentrant checkpointing saves its positional inputs for backward, and autograd can save only tensors and
``None``. Other inputs are captured in a closure. Megatron does the same for decoder layers, and since 0.18
for multi-token prediction layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from mindspeed_dsa.megatron.attribute_override import AttributeOverride


def save_tensors_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``MultiTokenPredictionLayer._checkpointed_forward`` to pass only tensors to the checkpoint.

    Args:
        original: Megatron's method. It takes the forward to checkpoint and its inputs by name: hidden states
            and embeddings ``[sequence, batch, hidden]``, masks, rotary embeddings, and objects such as
            ``PackedSeqParams``.
    """

    def _checkpointed_forward(self: Any, forward_func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        saved = {name: value for name, value in kwargs.items() if value is None or isinstance(value, Tensor)}
        kept = {name: value for name, value in kwargs.items() if name not in saved}

        def forward(*values: Any, **named: Any) -> Any:
            # The original passes inputs by position when it checkpoints. It passes them by name with
            # Transformer Engine's checkpoint, and where the method `block` skips a layer: then `of_keywords`
            # is empty, and `named` has the saved inputs.
            by_position, of_keywords = values[: len(args)], values[len(args) :]
            return forward_func(*by_position, **dict(zip(saved, of_keywords, strict=False)), **named, **kept)

        return original(self, forward, *args, **saved)

    return _checkpointed_forward


def take_padding_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``MultiTokenPredictionLayer._checkpointed_forward`` of 0.18 to accept a padding mask.

    The mask is bound to the checkpointed method, ``_proj_and_transformer_layer``, which accepts one.

    Args:
        original: Megatron's method. It takes the inputs by name except ``padding_mask``, bool
            ``[batch, sequence]``, true for tokens that routers do not count.
    """

    def _checkpointed_forward(
        self: Any, *args: Any, padding_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        if padding_mask is None:
            return original(self, *args, **kwargs)
        forward = partial(self._proj_and_transformer_layer, padding_mask=padding_mask)
        return original(AttributeOverride(self, _proj_and_transformer_layer=forward), *args, **kwargs)

    return _checkpointed_forward
