"""Which modules of which layers swap, and where a layer's forward begins and ends.

Imports Megatron only when called: this is fetched while Megatron is being imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mindspeed_dsa.features.host import host
from mindspeed_dsa.features.memory import swap_attention_limits as limits
from mindspeed_dsa.features.memory.recompute_layers import after_building, after_building_mtp
from mindspeed_dsa.features.memory.swap_attention_pass import LayerPass, running

_DEST = "swap_attention"
_chosen: WeakKeyDictionary[Any, tuple[str, ...]] = WeakKeyDictionary()
"""Layers that swap, with the attributes of the modules that do."""
_pass_of_output: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""By a layer's output, which is the input of the layer above: passes find each other by it."""


def swap_in_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``TransformerLayer.forward``."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        modules = _chosen.get(self)
        if modules is None or not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        hidden_states = args[0] if args else kwargs["hidden_states"]
        others = [*args[1:], *(value for name, value in kwargs.items() if name != "hidden_states")]
        layer_pass = LayerPass(
            f"layer {self.layer_number}",
            limits.min_bytes(),
            _of_others([getattr(self, name) for name in modules], others),
            _pass_of_output.get(hidden_states),
            # Transformer Engine computes every other part of the sequence on a stream of its own.
            of_any_stream=self.config.context_parallel_size > 1,
        )
        with layer_pass.whole_layer():
            result = original(self, *args, **kwargs)
        output = result[0]
        if output.requires_grad:
            output.register_hook(layer_pass.backward_begins)
            _pass_of_output[output] = layer_pass
        return result

    return forward


def _of_others(modules: list[Any], arguments: list[Any]) -> Iterator[Tensor]:
    """Parameters and buffers, and what every layer is given: masks, rotary angles, the encoder's output."""
    for module in modules:
        yield from module.parameters()
        yield from module.buffers()
    yield from _tensors(arguments)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value):
        yield from _tensors(list(vars(value).values()))


def choose_in_block(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``TransformerBlock.__init__``."""
    return after_building(original, _choose, _DEST, limits.problems)


def choose_in_mtp(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``MultiTokenPredictionBlock.__init__``."""
    return after_building_mtp(original, _choose, _DEST)


def _choose(layer: Any) -> None:
    _chosen[layer] = limits.modules()
    for name in _chosen[layer]:
        module = getattr(layer, name)
        module.register_forward_pre_hook(_enter)
        module.register_forward_hook(_leave, always_call=True)


_entered: WeakKeyDictionary[Any, list[contextlib.ExitStack]] = WeakKeyDictionary()
"""By module; a module inside itself would have more than one."""


def _enter(module: Any, _: Any) -> None:
    stack = contextlib.ExitStack()
    layer_pass = running()
    if layer_pass is not None and torch.is_grad_enabled():
        stack.enter_context(_told_to_transformer_engine())
        stack.enter_context(layer_pass.hooks())
    _entered.setdefault(module, []).append(stack)


def _leave(module: Any, _: Any, __: Any) -> None:
    stacks = _entered.get(module)
    if stacks:  # none if a hook of somebody else has raised before ours was called
        stacks.pop().close()


@contextlib.contextmanager
def _told_to_transformer_engine() -> Iterator[None]:
    """Its linear layers keep their weights as parameters if they know of hooks on saved tensors."""
    extension = host("core.extensions.transformer_engine")
    engine = getattr(extension, "cpu_offload", None)
    if engine is None:
        yield
        return
    before = getattr(engine, "CPUOffloadEnabled", None)  # not in every release; to set it does no harm
    engine.CPUOffloadEnabled = True
    try:
        yield
    finally:
        if before is None:
            del engine.CPUOffloadEnabled
        else:
            engine.CPUOffloadEnabled = before
