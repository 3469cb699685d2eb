"""Attention of one sequence in two halves of tokens; the second half attends to the keys of both.

The first half runs like a shorter sequence, because causal queries need no later keys. The second half
computes query, key and value of its own tokens, with the right positions, and prepends the first half's keys
and values. An indexer gets the hidden states of both halves, because it computes its own keys. It recomputes
its keys of the first half, which costs one small matmul.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor


class Keys:
    """Keys, values and indexer inputs of a layer's first half, kept for its second half.

    Args:
        layer: Megatron's transformer layer, with MLA.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._rows = 0
        self._earlier: dict[str, Tensor] = {}

    @contextlib.contextmanager
    def of_half(self) -> Iterator[None]:
        """Context for the attention of one half. Enter it once for half 0, then once for half 1."""
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
        if value.dim() > 3:  # otherwise it is a weight that turns keys into values (absorbed MLA)
            value = self._joined("value", value)
        return query, key, value, *rest

    @staticmethod
    def _place(rows: int) -> Callable[..., Any]:
        def begin_at(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            # Rotary angles of the second half begin at its first position in the sequence.
            return args, kwargs | {"offset": rows}

        return begin_at

    def _with_both(self, module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if "x" not in kwargs:
            return None
        x, qr = kwargs["x"].detach(), kwargs["qr"].detach()
        if self._layer.recompute_input_layernorm:
            x = x.clone()  # the layer frees its own copy after attention
        return args, kwargs | {"x": self._joined("x", x), "qr": self._joined("qr", qr)}

    def _joined(self, name: str, of_half: Tensor) -> Tensor:
        """Prepend the first half's tensor; in the first half, store the tensor and return it."""
        earlier = self._earlier.pop(name, None)
        if earlier is None:
            self._earlier[name] = of_half
            return of_half
        return torch.cat((earlier, of_half))
