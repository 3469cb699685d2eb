"""Which modules of which layers swap, and where a layer's forward begins and ends."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.features.memory.swap_attention.feature import Options, check_swapped_attention
from mindspeed_dsa.features.memory.swap_attention.layer_pass import LayerPass, running
from mindspeed_dsa.megatron import layer_pieces, layers, releases
from mindspeed_dsa.parallel.local_shards import local_of

_chosen: WeakKeyDictionary[Any, tuple[str, ...]] = WeakKeyDictionary()
"""Layers that swap, with the attributes of the modules that do."""
_pass_of_output: WeakKeyDictionary[Any, LayerPass] = WeakKeyDictionary()
"""By the storage of a layer's output, which is that of the layer above's input: passes find each other by it.

The tensor is another one where FSDP2 puts a node of its own between the layers.
"""


def swap_in_layer(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``TransformerLayer.forward``."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in _chosen or not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        hidden_states = args[0] if args else kwargs["hidden_states"]
        others = [*args[1:], *(value for name, value in kwargs.items() if name != "hidden_states")]
        swapping = _Swapping(context, self, hidden_states, others)
        with swapping.piece():
            result = original(self, *args, **kwargs)
        swapping.ends(result[0])
        return result

    return forward


class _Swapping(layer_pieces.Pass):
    """A forward of a layer that swaps.

    Args:
        context: the feature's.
        layer: which one.
        hidden_states: its input.
        others: what else it is given.
    """

    def __init__(
        self, context: Context[Options], layer: Any, hidden_states: Tensor, others: Sequence[Any]
    ) -> None:
        self._context = context
        self._pass = LayerPass(
            f"layer {layer.layer_number}",
            context.options.smallest,
            _of_others([getattr(layer, name) for name in _chosen[layer]], list(others)),
            _pass_of_output.get(hidden_states.untyped_storage()),
            # Transformer Engine computes every other part of the sequence on a stream of its own.
            of_any_stream=layer.config.context_parallel_size > 1,
        )

    def piece(self) -> contextlib.AbstractContextManager[None]:
        return self._pass.piece()

    def ends(self, output: Tensor) -> None:
        layer_pass = self._pass
        layer_pass.leave()
        if layer_pass.largest_too_small:
            self._context.log.info(
                "swap-attention: %s swaps nothing: the largest storage that could leave has %d bytes, fewer "
                "than --swap-attention-min-bytes %d",
                layer_pass.name,
                layer_pass.largest_too_small,
                self._context.options.smallest,
                once=layer_pass.name,
                ranks="stage",
            )
        if output.requires_grad:
            output.register_hook(layer_pass.backward_begins)
            _pass_of_output[output.untyped_storage()] = layer_pass


def _of_others(modules: list[Any], arguments: list[Any]) -> Iterator[Tensor]:
    """Parameters and buffers, and what every layer is given: masks, rotary angles, the encoder's output."""
    for module in modules:
        # Shards are gathered into other memory, which is marked.
        yield from (each for each in module.parameters() if local_of(each) is each)
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


def choose_in_block(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``TransformerBlock.__init__``."""
    return layers.choose_in_block(original, context, _choose_with(context), check_swapped_attention)


def choose_in_mtp(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``MultiTokenPredictionBlock.__init__``."""
    return layers.choose_in_mtp(original, context, _choose_with(context))


def _choose_with(context: Context[Options]) -> Callable[[Any], None]:
    def enter(module: Any, _: Any) -> None:
        stack = contextlib.ExitStack()
        layer_pass = running()
        if layer_pass is not None and torch.is_grad_enabled():
            stack.enter_context(_with_parameters_kept(context.megatron))
            stack.enter_context(layer_pass.hooks())
        _entered.setdefault(module, []).append(stack)

    def choose(layer: Any) -> None:
        _chosen[layer] = context.options.attributes
        for name in _chosen[layer]:
            module = getattr(layer, name)
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(_leave, always_call=True)
        layer_pieces.follow(layer, partial(_Swapping, context))

    return choose


_entered: WeakKeyDictionary[Any, list[contextlib.ExitStack]] = WeakKeyDictionary()
"""By module; a module inside itself would have more than one."""


def _leave(module: Any, _: Any, __: Any) -> None:
    stacks = _entered.get(module)
    if stacks:  # none if another hook has raised before ours was called
        stacks.pop().close()


@contextlib.contextmanager
def _with_parameters_kept(megatron: Megatron) -> Iterator[None]:
    """Transformer Engine's linear layers keep weights as parameters if they know of such hooks."""
    engine = getattr(releases.transformer_engine(megatron), "cpu_offload", None)
    if engine is None:
        yield
        return
    before = getattr(engine, "CPUOffloadEnabled", None)  # not in every release; setting it does no harm
    engine.CPUOffloadEnabled = True
    try:
        yield
    finally:
        if before is None:
            del engine.CPUOffloadEnabled
        else:
            engine.CPUOffloadEnabled = before
