"""Optimizer state in memory that the optimizer did not allocate: relocated moments, freed master weights.

Moments can be relocated for every Adam that Megatron builds. torch, Apex and Transformer Engine all name them
``exp_avg`` and ``exp_avg_sq``, and in the first step allocate them only for parameters without state. So it
suffices to fill the state with our own tensors before the first step.

If the values of a master weight are stored elsewhere, its tensor remains, but without memory. Megatron and
the optimizer use the tensor as a key, for example into the optimizer's state. See :class:`FreedStorage`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.megatron.optimizer import OptimizerState, StepIntegrity, is_sharded
from mindspeed_dsa.parallel.local_shards import local_of
from mindspeed_dsa.patches.errors import SettingsError

MOMENTS = ("exp_avg", "exp_avg_sq")


def is_torch_adam(optimizer: Any) -> bool:
    """Return whether the optimizer is torch's Adam or AdamW."""
    # Before torch 2.7 neither class is a subclass of the other.
    return isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))


class Moments:
    """Moments of one optimizer, in preallocated memory.

    Args:
        optimizer: inner torch-style optimizer, not Megatron's wrapper.
        places: preallocated fp32 ``(exp_avg, exp_avg_sq)`` per parameter, zeroed, shard-shaped under
            sharding. Parameters not listed keep the optimizer's default allocation.
        write: ``write(target, values)``, replacement for ``Tensor.copy_`` if that cannot write this memory.

    Attributes:
        optimizer: inner optimizer.
        places: dict from parameter to its moments, keyed ``exp_avg`` and ``exp_avg_sq``.
    """

    def __init__(
        self,
        optimizer: Any,
        places: Mapping[Tensor, tuple[Tensor, Tensor]],
        write: Callable[[Tensor, Tensor], Any] = Tensor.copy_,
    ) -> None:
        self.optimizer, self._write = optimizer, write
        self.places = {
            parameter: dict(zip(MOMENTS, tensors, strict=True)) for parameter, tensors in places.items()
        }

    def begin(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameter's state, initialized as for a first step if it is empty.

        Args:
            parameter: parameter of the optimizer.
            group: param group of the parameter.
        """
        state: dict[str, Any] = self.optimizer.state[parameter]
        if is_torch_adam(self.optimizer) and "step" not in state:
            on_device = group["capturable"] or group["fused"]
            # Insert `step` before the moments, as torch does: state dicts keep the insertion order.
            state["step"] = torch.zeros(
                (), dtype=torch.float32, device=parameter.device if on_device else "cpu"
            )
        return self._start(parameter)

    def begin_step(self) -> None:
        """Call :meth:`begin` for all parameters with a gradient."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.begin(parameter, group)

    def begin_all(self) -> None:
        """Call :meth:`begin` for all parameters."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                self.begin(parameter, group)

    def init_state(self, optimizer: Any, config: Any = None) -> None:
        """Create the moments of all parameters; replaces Megatron's ``init_state_fn``."""
        # Without `step`: Megatron's own function creates the moments only.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not optimizer.state[parameter]:
                    self._start(parameter)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Make the optimizer's ``load_state_dict`` copy moments directly into the preallocated tensors."""
        # torch's method first copies all of them to the device of the parameters.
        load = partial(self._load, self.optimizer.load_state_dict)
        with replaced(self.optimizer, "load_state_dict", load):
            yield

    @torch.no_grad()
    def _load(self, original: Callable[[Any], Any], state_dict: Mapping[str, Any]) -> None:
        # State dicts number the parameters in the order of the param groups.
        names = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [param for group in self.optimizer.param_groups for param in group["params"]]
        places = {
            index: self.places[parameter]
            for index, parameter in zip(names, parameters, strict=True)
            if parameter in self.places
        }
        saved_states: Mapping[Any, Mapping[str, Any]] = state_dict["state"]
        if is_torch_adam(self.optimizer) and any(
            MOMENTS[0] in state and "step" not in state for state in saved_states.values()
        ):
            raise SettingsError(
                "this checkpoint has moments and no count of steps, and Adam would begin at 0: Megatron "
                "writes the count of rank 0 alone, whose pipeline stage has no such parameters; put some in "
                "the first stage when it is saved, or add --no-load-optim to load the weights alone"
            )
        rest = {
            index: {key: value for key, value in state.items() if not (index in places and key in MOMENTS)}
            for index, state in saved_states.items()
        }
        # The optimizer loads everything except the relocated moments.
        original({**state_dict, "state": rest})
        for index, parameter in zip(names, parameters, strict=True):
            if index not in places:
                continue
            values = saved_states.get(index, {})
            for key, place in places[index].items():
                if key not in values:
                    place.zero_()  # as before a first step
                elif values[key] is not place:
                    self._write(local_of(place), local_of(values[key]))
            if values:
                # Keep the key order of the saved state.
                loaded = {**self.optimizer.state[parameter], **places[index]}
                self.optimizer.state[parameter] = {key: loaded[key] for key in values}

    def _start(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state[parameter]
        places = self.places.get(parameter, {})
        for key in MOMENTS:
            if key not in state:
                state[key] = places[key] if places else torch.zeros_like(parameter)
        return state


@contextlib.contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Set an instance attribute inside the block, and restore or delete it afterwards."""
    before = vars(holder).get(name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        delattr(holder, name)  # uncovers a class attribute of the same name
        if before is not None:
            setattr(holder, name, before)


class StateWithMoments(OptimizerState):
    """State of an optimizer with relocated moments.

    Attributes:
        moments: moments of the inner optimizer.
    """

    def __init__(self, optimizer: Any, moments: Moments, integrity: StepIntegrity) -> None:
        self.moments, self.integrity = moments, integrity
        self._is_sharded = is_sharded(optimizer)
        optimizer.init_state_fn = moments.init_state

    def state_dict(self, call: Callable[[], Any]) -> Any:
        if self._is_sharded and is_torch_adam(self.moments.optimizer):
            # Megatron reads the step count of torch's Adam even before the first step.
            self.moments.begin_all()
        return call()

    def load_state_dict(self, call: Callable[[], Any]) -> Any:
        """Load the state, copying moments directly into the preallocated tensors."""
        self.moments.begin_all()  # otherwise Megatron allocates moments on the device
        with self.moments.loading():
            return call()


class FreedStorage:
    """Placeholder memory for tensors whose values are stored elsewhere: one NaN per device, expanded.

    Freed tensors keep their shape and device. To reveal accidental accesses, reading gives NaN, and writing
    raises an error.
    """

    def __init__(self) -> None:
        self._nan: dict[torch.device, Tensor] = {}

    def free(self, tensor: Tensor) -> None:
        """Free the memory of a float32 tensor, or of this rank's local shard of it."""
        tensor = local_of(tensor)
        if tensor.device not in self._nan:
            self._nan[tensor.device] = torch.full((), math.nan, dtype=torch.float32, device=tensor.device)
        tensor.data = self._nan[tensor.device].expand(tensor.shape)
