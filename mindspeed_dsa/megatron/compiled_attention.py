"""Compiled steps of latent attention: offered for a layer by one feature, asked for by another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor


@dataclass(frozen=True)
class CompiledSteps:
    """Compiled steps that a layer's attention may call in place of its own operators.

    Attributes:
        prolog: gets an ``MLASelfAttention``, its hidden states ``[s, b, hidden]`` and the key's up-projection
            ``[heads, qk_head_dim, kv_lora_rank]``. Returns, as ``get_query_key_value_tensors`` does, query
            ``[s, b, heads, kv_lora_rank + rope]`` and key ``[s, b, 1, kv_lora_rank + rope]`` in absorbed
            form, the latent query and the latent key-value; ``None`` for a layer that it does not serve.
        epilog: gets attention over latents, ``[b, s, heads, kv_lora_rank]``, and the value's up-projection
            ``[heads, value_dim, kv_lora_rank]``; returns ``[s, b, heads * value_dim]``.
    """

    prolog: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor] | None]
    epilog: Callable[[Tensor, Tensor], Tensor]


_steps: WeakKeyDictionary[Any, CompiledSteps] = WeakKeyDictionary()


def offer(layer: Any, steps: CompiledSteps) -> None:
    """Let whoever asks for this layer's steps find them; they must not refer to the layer."""
    _steps[layer] = steps


def steps_of(layer: Any) -> CompiledSteps | None:
    """Return a layer's compiled steps, if it has any."""
    return _steps.get(layer)
