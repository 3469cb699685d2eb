"""Inputs of a layer of multi-token prediction that is recomputed in backward: what is saved, what is kept.

Reentrant checkpointing saves its positional inputs for backward, and autograd saves tensors and ``None``
only. Other inputs are kept by a closure, as Megatron's decoder layers keep theirs, and its layers of
multi-token prediction do since 0.18.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from mindspeed_dsa.megatron.attribute_override import AttributeOverride


def save_tensors_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``MultiTokenPredictionLayer._checkpointed_forward`` of releases that save every input.

    The original passes inputs on by position, and by name where Transformer Engine checkpoints or where the
    method ``block`` recomputes nothing.

    Args:
        original: takes the forward that is checkpointed, and its inputs by name: hidden states and embeddings
            ``[sequence, batch, hidden]``, masks and rotary embeddings, and objects such as
            ``PackedSeqParams``.
    """

    def _checkpointed_forward(self: Any, forward_func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        saved = {name: value for name, value in kwargs.items() if value is None or isinstance(value, Tensor)}
        kept = {name: value for name, value in kwargs.items() if name not in saved}

        def forward(*values: Any, **named: Any) -> Any:
            by_position, of_keywords = values[: len(args)], values[len(args) :]
            # Passed on by name, there are no values of keywords here.
            return forward_func(*by_position, **dict(zip(saved, of_keywords, strict=False)), **named, **kept)

        return original(self, forward, *args, **saved)

    return _checkpointed_forward


def take_padding_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``MultiTokenPredictionLayer._checkpointed_forward`` of 0.18, which takes no padding mask.

    The forward that it checkpoints does, and gets it beside what is saved.

    Args:
        original: takes the inputs by name, all but ``padding_mask``, bool ``[batch, sequence]``, true where
            routers count no token.
    """

    def _checkpointed_forward(
        self: Any, *args: Any, padding_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        if padding_mask is None:
            return original(self, *args, **kwargs)
        forward = partial(self._proj_and_transformer_layer, padding_mask=padding_mask)
        return original(AttributeOverride(self, _proj_and_transformer_layer=forward), *args, **kwargs)

    return _checkpointed_forward
