"""Attention of the rows of sequences in two halves, of which the second one sees the keys of both.

The first half runs as a shorter sequence: causal rows see none of the others. For the second one its own
query, key and value are derived at their places in the sequence, and the first half's key and value come
before its own. An indexer gets the inputs of both halves, as many rows as there are keys: its keys of the
first half are computed again, at a cost of one small product.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor


class Keys:
    """Keys and an indexer's inputs that the second half of a layer's attention takes from the first.

    Args:
        layer: Megatron's transformer layer, with latent attention.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._rows = 0
        self._earlier: dict[str, Tensor] = {}

    @contextlib.contextmanager
    def of_half(self) -> Iterator[None]:
        """Surround attention of the first half, and then that of the second."""
        attention = self._layer.self_attention
        derive = attention.get_query_key_value_tensors
        with contextlib.ExitStack() as stack:
            attention.get_query_key_value_tensors = partial(self._derive, derive)
            stack.callback(delattr, attention, "get_query_key_value_tensors")
            for module, hook in (
                (attention.rotary_pos_emb, self._place(self._rows)),
                (attention.core_attention, self._with_both),
            ):
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            yield

    def _derive(self, derive: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        query, key, value, *rest = derive(hidden, *args, **kwargs)
        self._rows += hidden.size(0)
        key = self._joined("key", key)
        if value.dim() > 3:  # else it is a weight that makes values of keys
            value = self._joined("value", value)
        return query, key, value, *rest

    @staticmethod
    def _place(rows: int) -> Callable[..., Any]:
        def begin_at(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            return args, kwargs | {"offset": rows}

        return begin_at

    def _with_both(self, module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if "x" not in kwargs:
            return None
        x, qr = kwargs["x"].detach(), kwargs["qr"].detach()
        if self._layer.recompute_input_layernorm:
            x = x.clone()  # the layer frees its own behind attention
        return args, kwargs | {"x": self._joined("x", x), "qr": self._joined("qr", qr)}

    def _joined(self, name: str, of_half: Tensor) -> Tensor:
        """Return the rows of both halves, or keep those of the first."""
        earlier = self._earlier.pop(name, None)
        if earlier is None:
            self._earlier[name] = of_half
            return of_half
        return torch.cat((earlier, of_half))
