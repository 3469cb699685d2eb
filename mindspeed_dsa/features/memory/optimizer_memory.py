"""Optimizer state outside of the memory that an optimizer would give it: moments elsewhere, masters freed.

Moments work with any Adam that Megatron builds: torch, Apex and Transformer Engine agree on the names
``exp_avg`` and ``exp_avg_sq`` in the optimizer's state, create them in the first step where a parameter has
no state yet, and use what they find there afterwards. So a state that exists before the first step decides
where the moments are.

Master weights stay as tensors when their numbers go elsewhere, because Megatron and the optimizer know each
by its tensor, as a key of the optimizer's state for instance: see :class:`FreedStorage`.
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
    """Return whether it is torch's own; before torch 2.7 neither class is the other's subclass."""
    return isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))


class Moments:
    """The moments of one optimizer.

    Args:
        optimizer: the inner optimizer, not Megatron's.
        places: for the optimizer's parameters the two float32 tensors, shaped as the parameter or as this
            rank's piece of it, that its moments are to be kept in, zero at first. Those of other parameters
            are as they would be.
        write: ``write(place, values)``, for memory that ``Tensor.copy_`` cannot write.

    Attributes:
        optimizer: the inner optimizer.
        places: by parameter and name of the moment.
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
        """Return the parameter's state, with what a first step starts from if there is none.

        Args:
            parameter: one of the optimizer's.
            group: its parameter group.
        """
        state: dict[str, Any] = self.optimizer.state[parameter]
        if is_torch_adam(self.optimizer) and "step" not in state:
            on_device = group["capturable"] or group["fused"]
            # Before the moments, unless there are some: state dicts show the order in which torch makes them.
            state["step"] = torch.zeros(
                (), dtype=torch.float32, device=parameter.device if on_device else "cpu"
            )
        return self._start(parameter)

    def begin_step(self) -> None:
        """:meth:`begin` for all parameters that have a gradient."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.begin(parameter, group)

    def begin_all(self) -> None:
        """:meth:`begin` for all parameters."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                self.begin(parameter, group)

    def init_state(self, optimizer: Any, config: Any = None) -> None:
        """Take the place of Megatron's ``init_state_fn``, which makes the moments alone."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not optimizer.state[parameter]:
                    self._start(parameter)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Let the optimizer's ``load_state_dict`` copy moments to their places.

        torch's own copies all of them to the parameters' device first.
        """
        load = partial(self._load, self.optimizer.load_state_dict)
        with replaced(self.optimizer, "load_state_dict", load):
            yield

    @torch.no_grad()
    def _load(self, original: Callable[[Any], Any], state_dict: Mapping[str, Any]) -> None:
        names = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
        own = {
            index: self.places[parameter]
            for index, parameter in zip(names, parameters, strict=True)
            if parameter in self.places
        }
        given: Mapping[Any, Mapping[str, Any]] = state_dict["state"]
        if is_torch_adam(self.optimizer) and any(
            MOMENTS[0] in state and "step" not in state for state in given.values()
        ):
            raise SettingsError(
                "this checkpoint has moments and no count of steps, and Adam would begin at 0: Megatron "
                "writes the count of rank 0 alone, whose pipeline stage has no such parameters; put some in "
                "the first stage when it is saved, or add --no-load-optim to load the weights alone"
            )
        rest = {
            index: {key: value for key, value in state.items() if not (index in own and key in MOMENTS)}
            for index, state in given.items()
        }
        original({**state_dict, "state": rest})
        for index, parameter in zip(names, parameters, strict=True):
            if index not in own:
                continue
            values = given.get(index, {})
            for key, place in own[index].items():
                if key not in values:
                    place.zero_()  # what a first step starts from
                elif values[key] is not place:
                    self._write(local_of(place), local_of(values[key]))
            if values:
                loaded = {**self.optimizer.state[parameter], **own[index]}
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
    """Set an instance attribute for the duration of a block, whether or not there is one already."""
    before = vars(holder).get(name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        delattr(holder, name)
        if before is not None:
            setattr(holder, name, before)


class StateWithMoments(OptimizerState):
    """State of an optimizer whose moments lie in places of this library's choice.

    Attributes:
        moments: where the inner optimizer's state has them.
    """

    def __init__(self, optimizer: Any, moments: Moments, integrity: StepIntegrity) -> None:
        self.moments, self.integrity = moments, integrity
        self._is_sharded = is_sharded(optimizer)
        optimizer.init_state_fn = moments.init_state

    def state_dict(self, call: Callable[[], Any]) -> Any:
        if self._is_sharded and is_torch_adam(self.moments.optimizer):
            # Megatron asks torch's Adam for its step count, also before the first step.
            self.moments.begin_all()
        return call()

    def load_state_dict(self, call: Callable[[], Any]) -> Any:
        """Copy moments to their places, not to the device first."""
        self.moments.begin_all()  # otherwise Megatron makes some on the device
        with self.moments.loading():
            return call()


class FreedStorage:
    """Stand-in for numbers that lie elsewhere: a single NaN on each device, which freed tensors view.

    Freed tensors keep shape and device. Reading gives NaN, and writing raises torch's error: neither
    goes unnoticed.
    """

    def __init__(self) -> None:
        self._nan: dict[torch.device, Tensor] = {}

    def free(self, tensor: Tensor) -> None:
        """Free the memory of a float32 tensor, or of this rank's shard of it."""
        tensor = local_of(tensor)
        if tensor.device not in self._nan:
            self._nan[tensor.device] = torch.full((), math.nan, dtype=torch.float32, device=tensor.device)
        tensor.data = self._nan[tensor.device].expand(tensor.shape)
