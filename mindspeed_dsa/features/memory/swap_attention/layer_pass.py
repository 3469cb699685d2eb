"""Swap of the tensors that selected modules save in one forward of a layer.

Each forward of a layer has its own :class:`LayerPass`, which is referenced only by the autograd graph of that
forward. Any order of microbatches and layers in the schedule therefore works.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import ref

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

_SWAPS = "_mindspeed_dsa_swaps"
"""Attribute of a layer that swaps: the :class:`_Modules` that do."""


def swap_in_layer(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``TransformerLayer.forward`` to swap the tensors that it saves."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _SWAPS not in vars(self) or not torch.is_grad_enabled():
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
    """Layer forward during which the selected modules' saved tensors are swapped.

    Args:
        context: context of the feature.
        layer: transformer layer.
        hidden_states: input of the layer.
        others: other arguments of the layer's forward.
    """

    def __init__(
        self, context: Context[Options], layer: Any, hidden_states: Tensor, others: Sequence[Any]
    ) -> None:
        self._context, self._choice = context, context.state(Choice)
        self._modules: _Modules = vars(layer)[_SWAPS]
        self._pass = LayerPass(
            f"layer {layer.layer_number}",
            context.options.smallest,
            _of_others([getattr(layer, name) for name in self._modules.names], list(others)),
            self._choice.pass_of_output.get(hidden_states.untyped_storage()),
            # Transformer Engine's context parallel attention alternates between two streams.
            of_any_stream=layer.config.context_parallel_size > 1,
            choice=self._choice,
            layer=layer,
        )

    @contextlib.contextmanager
    def piece(self) -> Iterator[None]:
        before, self._modules.running = self._modules.running, self._pass
        try:
            yield
        finally:
            self._modules.running = before

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
            self._choice.pass_of_output[output.untyped_storage()] = layer_pass


def _of_others(modules: list[Any], arguments: list[Any]) -> Iterator[Tensor]:
    """Yield tensors with other users, which stay on the device: parameters, buffers, masks and so on."""
    for module in modules:
        # Sharded parameters are gathered into other memory, which is marked separately.
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


def _choose_with(context: Context[Options]) -> Callable[[Any], None]:
    def choose(layer: Any) -> None:
        modules = vars(layer)[_SWAPS] = _Modules(context.options.attributes, context.megatron)
        for name in modules.names:
            module = getattr(layer, name)
            module.register_forward_pre_hook(partial(modules.enter, name))
            module.register_forward_hook(partial(modules.leave, name), always_call=True)
        split_layers.follow(layer, partial(_Swapping, context))

    return choose


class _Modules:
    """Hooks around the swapping modules of one layer, and the layer's running pass."""

    def __init__(self, names: tuple[str, ...], megatron: Megatron) -> None:
        self.names, self._megatron = names, megatron
        self.running: LayerPass | None = None
        # Open hook contexts, more than one if the module calls itself.
        self._entered: dict[str, list[contextlib.ExitStack]] = {name: [] for name in names}

    def enter(self, name: str, *_: Any) -> None:
        stack = contextlib.ExitStack()
        if self.running is not None and torch.is_grad_enabled():
            stack.enter_context(_with_parameters_kept(self._megatron))
            stack.enter_context(self.running.hooks())
        self._entered[name].append(stack)

    def leave(self, name: str, *_: Any) -> None:
        if self._entered[name]:  # empty if another pre-hook raised before ours ran
            self._entered[name].pop().close()


@contextlib.contextmanager
def _with_parameters_kept(megatron: Megatron) -> Iterator[None]:
    """Enable Transformer Engine's CPU offload flag, so that linear layers save weights as parameters."""
    engine = getattr(releases.transformer_engine(megatron), "cpu_offload", None)
    if engine is None:
        yield
        return
    # Missing in some releases, where setting it does no harm.
    before = getattr(engine, "CPUOffloadEnabled", None)
    engine.CPUOffloadEnabled = True
    try:
        yield
    finally:
        if before is None:
            del engine.CPUOffloadEnabled
        else:
            engine.CPUOffloadEnabled = before


class LayerPass:
    """Tensors saved by one forward of a layer, with saved-tensor hooks that swap them.

    Args:
        name: name of the layer in messages.
        min_bytes: size below which a storage stays on the device.
        stays: tensors whose memory stays on the device because it has other users.
        previous: pass of the layer below, which runs its backward next.
        of_any_stream: whether saved tensors may have been allocated on other streams than the current one.
        choice: limits on how much to swap; ``None`` swaps everything.
        layer: Megatron layer that runs the forward.

    Attributes:
        name: name of the layer in messages.
        largest_too_small: size of the largest storage below ``min_bytes``; 0 if any storage was large enough.
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
        # Last save by address. An address cannot be reused while the storage is referenced here.
        self._saved: dict[int, _Swapped] = {}
        self._gone: list[ref[SwappedStorage]] = []
        self.largest_too_small, self._has_large = 0, False
        self._choice = choice
        # Parts of the layer, and of the schedule around it, may run on another stream (--two-streams).
        self._stream = platforms.current().current_stream()
        self._limit, self._clock = (None, None) if choice is None else choice.starts(layer, self)

    def leave(self) -> None:
        """Release the device memory at the end of the layer's forward."""
        # With one large storage, the threshold does not disable the layer: no message is needed.
        if self._has_large:
            self.largest_too_small = 0
        if self._clock is not None:
            self._clock.end = now()
        for swapped in self._leaving:
            swapped.leave()
        # Weak references: the graph owns the storages, and frees them as backward proceeds.
        self._gone = [ref(swapped) for swapped in self._leaving]
        self._leaving, self._saved = [], {}

    def hooks(self) -> Any:
        """Return the ``saved_tensors_hooks`` context of this pass."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def backward_begins(self, _: Tensor) -> None:
        """Start to fetch this layer's and the previous layer's storages when backward reaches this layer."""
        # The fetch is one layer ahead: this layer was fetched by the layer above, unless it is the last.
        for layer_pass in (self, self._previous):
            if layer_pass is not None:
                layer_pass._come_back(self)

    def _come_back(self, above: LayerPass) -> None:
        """Copy swapped storages back in reverse order of saving, which is the order of backward's reads."""
        if self._clock is not None and self._clock.asked is None:
            self._clock.asked = now()
            self._clock.above = above._clock if above is not self else None
        platform = platforms.current()
        with platform.use_stream(self._stream):  # the stream that owns their memory
            # Backward reads the last saved storage first.
            for former in reversed(self._gone):
                swapped = former()
                if swapped is not None:
                    swapped.come_back()

    def _pack(self, tensor: Tensor) -> _Saved:
        if not self._may_leave(tensor):
            return _Kept(tensor, self.name)
        storage, self._has_large = tensor.untyped_storage(), True
        # Copy now and not at the module's end, so that the copy overlaps with the rest of the module. The
        # copy misses later writes that bypass the version counter, but autograd does not see those either.
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
        """Return whether swapping a storage of this size would exceed a limit."""
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
        if tensor.is_leaf and tensor.requires_grad:  # stays alive for its gradient
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
    """Base class of the objects that replace saved tensors in the graph.

    Autograd does not detect in-place changes of tensors that saved-tensor hooks replace, so this class
    compares the version counter itself.
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
    """Saved tensor that stays on the device."""

    def __init__(self, tensor: Tensor, name: str) -> None:
        if isinstance(tensor, Parameter):
            saved_tensors.remember_parameter(tensor)
        # Detach: a node that holds its own output, graph included, would never be freed.
        super().__init__(tensor if tensor.is_leaf else tensor.detach(), name)

    def tensor(self) -> Tensor:
        self._check(self._watched.shape)
        return self._watched


class _Swapped(_Saved):
    """Saved tensor whose storage is copied to the host."""

    def __init__(self, tensor: Tensor, name: str, swapped: SwappedStorage) -> None:
        counter = tensor.detach()  # shares the version counter
        counter.data = tensor.new_empty(0)  # drops the memory and keeps the counter
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
        """Return whether the storage is unchanged since the save, by the version counters of both tensors."""
        # Views and detached tensors share a counter, but `tensor.data` has its own. That one may show the
        # saved number although the shared counter has moved.
        return self._watched._version == self._version == tensor._version


def _unpack(saved: _Saved) -> Tensor:
    return saved.tensor()


choose_in_block, choose_in_mtp = chosen_layers.decorators(_choose_with, check_swapped_attention)
