"""The master weights of one optimizer, which are void in pair form (see ``voids.py``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mindspeed_dsa.features.memory.reuse_fp32_param.shared_storage import SharedStorage
from mindspeed_dsa.features.memory.voids import Voids
from mindspeed_dsa.megatron.whole_steps import WholeSteps, Writes


@dataclass(frozen=True)
class Master:
    """One master weight.

    Attributes:
        tensor: float32, what Megatron and the optimizer hold.
        storage: where its numbers lie.
        start: position of its first number there.
    """

    tensor: Tensor
    storage: SharedStorage
    start: int

    def values(self) -> Tensor:
        """A copy in float32, shaped as the tensor."""
        return self.storage.read(self.start, self.start + self.tensor.numel()).view(self.tensor.shape)


class Masters:
    """All master weights of an optimizer whose numbers lie in shared storages, in pair form at first.

    Args:
        masters: the weights.
        whole: to be torn by a step that fails and leaves other numbers than Megatron's would.

    Attributes:
        storages: each of them once.
        in_master_form: whether the tensors hold their numbers.
    """

    def __init__(self, masters: Sequence[Master], whole: WholeSteps) -> None:
        self._by_tensor = {each.tensor: each for each in masters}
        self.storages = list({id(each.storage): each.storage for each in masters}.values())
        self.in_master_form = False
        self._whole = whole
        self._is_changing = False
        self._voids = Voids()
        for each in masters:
            self._voids.void(each.tensor)

    def to_master(self) -> None:
        """The tensors hold the float32 weights; the model's bfloat16 weights are void."""
        self._is_changing = True
        for storage in self.storages:
            storage.to_master()
        for each in self._by_tensor.values():
            end = each.start + each.tensor.numel()
            each.tensor.data = each.storage.master[each.start : end].view(each.tensor.shape)
        self.in_master_form, self._is_changing = True, False

    def to_pairs(self) -> None:
        """The model's bfloat16 weights are there; the tensors are void."""
        self._is_changing = True
        for each in self._by_tensor.values():
            self._voids.void(each.tensor)
        for storage in self.storages:
            storage.to_pairs()
        self.in_master_form, self._is_changing = False, False

    @contextlib.contextmanager
    def stepping(self, optimizer: Any) -> Iterator[None]:
        """Master form for a step, which makes the pairs again at its end.

        A step that fails before it has written anything leaves the weights as they were. Another one leaves
        Megatron with the old weights and new master weights, which do not fit in one storage: then the pairs
        are those of the new ones, and the state is torn. Weights that are lost are NaN: those
        of other ranks, which master form lies over, and all if changing the form has failed.

        Args:
            optimizer: the inner one.
        """
        writes = None
        try:
            self.to_master()
            writes = Writes(optimizer, list(self._by_tensor))
            yield
        except BaseException:
            if self.in_master_form and not self._is_changing:
                if writes is None or writes.may_have_happened():
                    self._whole.tear(self._by_tensor)
                with contextlib.suppress(Exception):  # the first one is reported
                    self.to_pairs()
            self._spoil_what_is_lost()
            raise

    def _spoil_what_is_lost(self) -> None:
        """NaN for weights that a failed step has left nowhere."""
        if self._is_changing:
            for each in self._by_tensor.values():
                self._voids.void(each.tensor)
            for storage in self.storages:
                storage.spoil()
            self.in_master_form, self._is_changing = False, False
            self._whole.tear(self._by_tensor)
        for storage in self.storages:
            if storage.spoil_others():
                self._whole.tear(self._by_tensor)

    def values(self, tensor: Tensor) -> Tensor:
        """What ``tensor`` holds in master form, as a copy; the tensor itself if it is none of these."""
        return self._by_tensor[tensor].values() if tensor in self._by_tensor else tensor

    @contextlib.contextmanager
    def opened(self, tensors: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Copies of the float32 weights in ``tensors`` (all by default), written back at the end.

        Unlike :meth:`to_master` it leaves everything else in a bucket as it is.
        """
        chosen = self._by_tensor.values() if tensors is None else self._known(tensors)
        for each in chosen:
            each.tensor.data = each.values()
        try:
            yield
        finally:
            for each in chosen:
                each.storage.write(each.start, each.tensor.data.flatten())
                self._voids.void(each.tensor)

    def drop_lower_halves(self) -> None:
        """The float32 weights become what the bfloat16 weights are."""
        for storage in self.storages:
            storage.drop_lower_halves()

    def _known(self, tensors: Sequence[Tensor]) -> list[Master]:
        return [self._by_tensor[tensor] for tensor in tensors if tensor in self._by_tensor]
