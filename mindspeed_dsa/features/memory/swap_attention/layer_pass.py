"""Saved tensors of chosen modules in one forward of one layer, on their way to the host and back.

There is one :class:`LayerPass` for each microbatch and layer of a chunk, held by the graph of that forward
alone, so nothing depends on the order in which a schedule runs them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.nn import Parameter

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.features.memory import chosen_layers
from mindspeed_dsa.features.memory.swap_attention.feature import Options, check_swapped_attention
from mindspeed_dsa.features.memory.swap_attention.hidden_copies import Choice, Copies, now
from mindspeed_dsa.features.memory.swap_attention.swapped_storage import SwappedStorage
from mindspeed_dsa.megatron import releases, split_layers
from mindspeed_dsa.parallel import saved_tensors
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


class _Swapping(split_layers.Pass):
    """Forward of a layer that swaps.

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
            choice=context.state(Choice),
            layer=layer,
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
    """Yield parameters, buffers, and what every layer is given: masks, rotary angles, encoder's output."""
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
    return chosen_layers.choose_in_block(original, context, _choose_with(context), check_swapped_attention)


def choose_in_mtp(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``MultiTokenPredictionBlock.__init__``."""
    return chosen_layers.choose_in_mtp(original, context, _choose_with(context))


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
        split_layers.follow(layer, partial(_Swapping, context))

    return choose


_entered: WeakKeyDictionary[Any, list[contextlib.ExitStack]] = WeakKeyDictionary()
"""By module; a module inside itself would have more than one."""


def _leave(module: Any, _: Any, __: Any) -> None:
    stacks = _entered.get(module)
    if stacks:  # none if another hook has raised before ours was called
        stacks.pop().close()


@contextlib.contextmanager
def _with_parameters_kept(megatron: Megatron) -> Iterator[None]:
    """Let Transformer Engine's linear layers keep weights as parameters, as beside its own such hooks."""
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


_running: ContextVar[LayerPass | None] = ContextVar("running", default=None)


def running() -> LayerPass | None:
    """Return the pass that this thread is in."""
    return _running.get()


class LayerPass:
    """Tensors that one forward of a layer has saved.

    Args:
        name: of the layer, for messages.
        min_bytes: smaller storages stay on the device.
        stays: tensors whose memory stays on the device: others use it too.
        previous: the pass of the layer below, whose backward comes next.
        of_any_stream: the layer may allocate what it saves on more than one stream.
        choice: how much may be swapped; None: everything.
        layer: Megatron's, of which this is a forward.

    Attributes:
        name: as given.
        largest_too_small: bytes of the largest storage that is too small, if none has been large enough,
            whether or not it was swapped.
    """

    def __init__(
        self,
        name: str,
        min_bytes: int,
        stays: Iterator[Tensor],
        previous: LayerPass | None = None,
        of_any_stream: bool = False,
        choice: Choice | None = None,
        layer: Any = None,
    ) -> None:
        self.name, self._min_bytes = name, min_bytes
        self._stays = {tensor.untyped_storage().data_ptr() for tensor in stays}
        self._previous, self._of_any_stream = previous, of_any_stream
        self._leaving: list[SwappedStorage] = []
        # The last save, by address, which cannot be reused as long as the storage is held here.
        self._saved: dict[int, _Swapped] = {}
        self._gone: list[ref[SwappedStorage]] = []
        self.largest_too_small, self._has_large = 0, False
        self._choice = choice
        # Parts of the layer, and of the schedule around it, may run on another one (--two-streams).
        self._stream = platforms.current().current_stream()
        self._limit, self._clock = (None, None) if choice is None else choice.starts(layer, self)

    @contextlib.contextmanager
    def whole_layer(self) -> Iterator[None]:
        """Surround the layer's forward, at whose end the device's memory goes."""
        with self.piece():
            yield
        self.leave()

    @contextlib.contextmanager
    def piece(self) -> Iterator[None]:
        """Surround a part of the layer's forward."""
        token = _running.set(self)
        try:
            yield
        finally:
            _running.reset(token)

    def leave(self) -> None:
        """Let the device's memory go at the end of the layer's forward."""
        if self._has_large:
            self.largest_too_small = 0
        if self._clock is not None:
            self._clock.end = now()
        for swapped in self._leaving:
            swapped.leave()
        self._gone = [ref(swapped) for swapped in self._leaving]
        self._leaving, self._saved = [], {}

    def hooks(self) -> Any:
        """Return a context in which saved tensors are taken over from autograd."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def backward_begins(self, _: Tensor) -> None:
        """Fetch the layer below when the gradient of this layer's output is there.

        The fetch runs a whole layer ahead: this layer has been fetched already, unless it is the last.
        """
        for layer_pass in (self, self._previous):
            if layer_pass is not None:
                layer_pass._come_back(self)

    def _come_back(self, above: LayerPass) -> None:
        """Fetch what has been swapped; backward reads what was saved last first."""
        if self._clock is not None and self._clock.asked is None:
            self._clock.asked = now()
            self._clock.above = above._clock if above is not self else None
        platform = platforms.current()
        with platform.use_stream(self._stream):  # whose memory they lie in
            for former in reversed(self._gone):
                swapped = former()
                if swapped is not None:
                    swapped.come_back()

    def _pack(self, tensor: Tensor) -> _Saved:
        if not self._may_leave(tensor):
            return _Kept(tensor, self.name)
        storage, self._has_large = tensor.untyped_storage(), True
        # The copy starts now and not at the module's end, to run behind what is left of the module too. So
        # a write that no version counter shows is not in it; autograd does not see such a write either.
        former = self._saved.get(storage.data_ptr())
        if former is not None and former.is_as_saved(tensor):
            return _Swapped(tensor, self.name, former.swapped)
        if self._is_full(storage.nbytes()):
            return _Kept(tensor, self.name)
        copies = None if self._clock is None else Copies(storage.nbytes())
        of_any_stream = self._of_any_stream or platforms.current().current_stream() != self._stream
        swapped = SwappedStorage(storage, tensor.dtype, of_any_stream, copies)
        if copies is not None and self._clock is not None:
            self._clock.save(copies)
        if self._choice is not None:
            self._choice.takes(swapped)
        self._leaving.append(swapped)
        saved = self._saved[storage.data_ptr()] = _Swapped(tensor, self.name, swapped)
        return saved

    def _is_full(self, nbytes: int) -> bool:
        """Return whether no storage of this size may go any more."""
        if self._limit is not None and len(self._leaving) >= self._limit:
            return True
        if self._choice is None or self._choice.may_take(nbytes):
            return False
        if self._clock is not None:
            self._clock.denied.append(nbytes)
        return True

    def _may_leave(self, tensor: Tensor) -> bool:
        if (
            type(tensor) is not Tensor
            or tensor.layout != torch.strided
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return False
        if tensor.device.type != platforms.current().device_type:
            return False
        if tensor.is_leaf and tensor.requires_grad:  # held by what reads its gradient
            return False
        storage = tensor.untyped_storage()
        bytes_ = storage.nbytes()
        if bytes_ == 0 or storage.data_ptr() in self._stays or saved_tensors.is_freed(storage):
            return False
        if bytes_ < self._min_bytes:
            self.largest_too_small = max(self.largest_too_small, bytes_)
            return False
        return True


class _Saved:
    """Object that autograd holds in place of a tensor.

    Autograd does not watch tensors that hooks have taken, so whether they are changed in place is
    watched here, by the same counter.
    """

    def __init__(self, watched: Tensor, name: str) -> None:
        self._watched, self._version, self._name = watched, watched._version, name

    def tensor(self) -> Tensor:
        raise NotImplementedError

    def _check(self, shape: Any) -> None:
        if self._watched._version != self._version:
            raise RuntimeError(
                f"mindspeed_dsa: --swap-attention: {self._name}: a tensor of shape {list(shape)} that was "
                f"saved for backward has been changed in place afterwards (version {self._watched._version}, "
                f"saved at {self._version}), so gradients would be wrong; change a copy of it instead"
            )


class _Kept(_Saved):
    """Tensor that stays where it is."""

    def __init__(self, tensor: Tensor, name: str) -> None:
        if isinstance(tensor, Parameter):
            saved_tensors.remember_parameter(tensor)
        # A node that holds its own output, graph and all, would never be freed.
        super().__init__(tensor if tensor.is_leaf else tensor.detach(), name)

    def tensor(self) -> Tensor:
        self._check(self._watched.shape)
        return self._watched


class _Swapped(_Saved):
    """View of a storage that goes to the host."""

    def __init__(self, tensor: Tensor, name: str, swapped: SwappedStorage) -> None:
        counter = tensor.detach()  # shares the version counter,
        counter.data = tensor.new_empty(0)  # and no longer the memory
        super().__init__(counter, name)
        self.swapped = swapped
        self._dtype, self._device = tensor.dtype, tensor.device
        self._place = tensor.storage_offset(), tensor.size(), tensor.stride()

    def tensor(self) -> Tensor:
        self._check(self._place[1])
        return torch.empty(0, dtype=self._dtype, device=self._device).set_(
            self.swapped.on_device(), *self._place
        )

    def is_as_saved(self, tensor: Tensor) -> bool:
        """Return whether the storage has not changed since, by the counters of both tensors.

        Views and detached tensors share a counter; ``tensor.data`` has one of its own, which may show the
        same number after the other one has moved.
        """
        return self._watched._version == self._version == tensor._version


def _unpack(saved: _Saved) -> Tensor:
    return saved.tensor()
