"""One forward of one layer: what the chosen modules save for backward, on its way to the host and back.

There is one object for each microbatch and layer of a chunk, held by the graph of that forward alone, so
nothing depends on the order in which a schedule runs them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter

from mindspeed_dsa import platforms
from mindspeed_dsa.features.memory.swap_attention.swapped_storage import SwappedStorage
from mindspeed_dsa.parallel import saved_tensors

_running: ContextVar[LayerPass | None] = ContextVar("running", default=None)


def running() -> LayerPass | None:
    """The pass that this thread is in."""
    return _running.get()


class LayerPass:
    """What one forward of a layer has saved.

    Args:
        name: of the layer, for messages.
        min_bytes: smaller storages stay on the device.
        stays: tensors whose memory stays on the device: others use it too.
        previous: the pass of the layer below, whose backward comes next.
        of_any_stream: the layer may allocate what it saves on more than one stream.

    Attributes:
        name: as given.
        largest_too_small: bytes of the largest storage that is too small, if none has been large enough.
    """

    def __init__(
        self,
        name: str,
        min_bytes: int,
        stays: Iterator[Tensor],
        previous: LayerPass | None = None,
        of_any_stream: bool = False,
    ) -> None:
        self.name, self._min_bytes = name, min_bytes
        self._stays = {tensor.untyped_storage().data_ptr() for tensor in stays}
        self._previous, self._of_any_stream = previous, of_any_stream
        self._leaving: list[SwappedStorage] = []
        # The last save, by address, which cannot be reused as long as the storage is held here.
        self._saved: dict[int, _Swapped] = {}
        self._gone: list[ref[SwappedStorage]] = []
        self.largest_too_small = 0

    @contextlib.contextmanager
    def whole_layer(self) -> Iterator[None]:
        """The layer's forward. At its end the device's memory goes."""
        with self.piece():
            yield
        self.leave()

    @contextlib.contextmanager
    def piece(self) -> Iterator[None]:
        """A part of the layer's forward."""
        token = _running.set(self)
        try:
            yield
        finally:
            _running.reset(token)

    def leave(self) -> None:
        """The layer's forward is done; the device's memory goes."""
        if self._leaving:
            self.largest_too_small = 0
        for swapped in self._leaving:
            swapped.leave()
        self._gone = [ref(swapped) for swapped in self._leaving]
        self._leaving, self._saved = [], {}

    def hooks(self) -> Any:
        """Context in which what autograd saves is taken over."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def backward_begins(self, _: Tensor) -> None:
        """Hook on the gradient of the layer's output.

        The layer below is fetched a whole layer ahead; this one has been, unless it is the last.
        """
        for layer_pass in (self, self._previous):
            for former in () if layer_pass is None else layer_pass._gone:
                swapped = former()
                if swapped is not None:
                    swapped.come_back()

    def _pack(self, tensor: Tensor) -> _Saved:
        if not self._may_leave(tensor):
            return _Kept(tensor, self.name)
        storage = tensor.untyped_storage()
        # The copy starts now and not at the module's end, to run behind what is left of the module too. So
        # a write that no version counter shows is not in it; autograd does not see such a write either.
        former = self._saved.get(storage.data_ptr())
        if former is not None and former.is_as_saved(tensor):
            return _Swapped(tensor, self.name, former.swapped)
        swapped = SwappedStorage(storage, tensor.dtype, self._of_any_stream)
        self._leaving.append(swapped)
        saved = self._saved[storage.data_ptr()] = _Swapped(tensor, self.name, swapped)
        return saved

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
    """Handed to autograd in place of a tensor.

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
    """A tensor that stays where it is."""

    def __init__(self, tensor: Tensor, name: str) -> None:
        if isinstance(tensor, Parameter):
            saved_tensors.remember_parameter(tensor)
        # A node that holds its own output, graph and all, would never be freed.
        super().__init__(tensor if tensor.is_leaf else tensor.detach(), name)

    def tensor(self) -> Tensor:
        self._check(self._watched.shape)
        return self._watched


class _Swapped(_Saved):
    """A view of a storage that goes to the host."""

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
        """Whether the storage has not changed since, by the counters of both tensors.

        Views and detached tensors share a counter; ``tensor.data`` has one of its own, which may show the
        same number after the other one has moved.
        """
        return self._watched._version == self._version == tensor._version


def _unpack(saved: _Saved) -> Tensor:
    return saved.tensor()
