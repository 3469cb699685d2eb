"""Adam's moments in memory of this library's choice, for any Adam that Megatron builds.

torch, Apex and Transformer Engine agree on the names ``exp_avg`` and ``exp_avg_sq`` in the optimizer's
state, create them in the first step where a parameter has no state yet, and use what they find there
afterwards. So a state that exists before the first step decides where the moments are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
_ATTRIBUTE = "_mindspeed_dsa_moments"


def is_torch_adam(optimizer: Any) -> bool:
    """Whether it is torch's own Adam or AdamW, of which neither is the other's subclass before torch 2.7."""
    return isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))


class Moments:
    """The moments of one optimizer.

    Args:
        optimizer: the inner optimizer, not Megatron's.
        places: for the optimizer's parameters the two float32 tensors, shaped as the parameter, that its
            moments are to be kept in, zero at first. Those of other parameters are as they would be.
        write: ``write(place, values)``, for memory that ``Tensor.copy_`` cannot write.

    Attributes:
        places: by parameter and name of the moment.
    """

    def __init__(
        self,
        optimizer: Any,
        places: Mapping[Tensor, tuple[Tensor, Tensor]],
        write: Callable[[Tensor, Tensor], Any] = Tensor.copy_,
    ) -> None:
        self._optimizer, self._write = optimizer, write
        self.places = {
            parameter: dict(zip(MOMENTS, tensors, strict=True)) for parameter, tensors in places.items()
        }

    def begin(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """The parameter's state, with what a first step starts from if there is none.

        Args:
            parameter: one of the optimizer's.
            group: its parameter group.
        """
        state: dict[str, Any] = self._optimizer.state[parameter]
        if is_torch_adam(self._optimizer) and "step" not in state:
            on_device = group["capturable"] or group["fused"]
            # Before the moments, unless there are some: state dicts tell the order that torch makes them in.
            state["step"] = torch.zeros(
                (), dtype=torch.float32, device=parameter.device if on_device else "cpu"
            )
        return self._start(parameter)

    def begin_step(self) -> None:
        """:meth:`begin` for all parameters that have a gradient."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.begin(parameter, group)

    def begin_all(self) -> None:
        """:meth:`begin` for all parameters."""
        for group in self._optimizer.param_groups:
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
        load = partial(self._load, self._optimizer.load_state_dict)
        with replaced(self._optimizer, "load_state_dict", load):
            yield

    @torch.no_grad()
    def _load(self, original: Callable[[Any], Any], state_dict: Mapping[str, Any]) -> None:
        names = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [each for group in self._optimizer.param_groups for each in group["params"]]
        own = {
            index: self.places[parameter]
            for index, parameter in zip(names, parameters, strict=True)
            if parameter in self.places
        }
        given: Mapping[Any, Mapping[str, Any]] = state_dict["state"]
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
                    self._write(place, values[key])
            if values:
                loaded = {**self._optimizer.state[parameter], **own[index]}
                self._optimizer.state[parameter] = {key: loaded[key] for key in values}

    def _start(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state[parameter]
        places = self.places.get(parameter, {})
        for key in MOMENTS:
            if key not in state:
                state[key] = places[key] if places else torch.zeros_like(parameter)
        return state


@contextlib.contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """An instance attribute for the length of a block, whether or not there is one already."""
    before = vars(holder).get(name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        delattr(holder, name)
        if before is not None:
            setattr(holder, name, before)


def attach(optimizer: Any, moments: Moments) -> None:
    """Give the moments to one of Megatron's optimizers, whose inner optimizer has them."""
    setattr(optimizer, _ATTRIBUTE, moments)
    optimizer.init_state_fn = moments.init_state


def moments_of(optimizer: Any) -> Moments | None:
    """What :func:`attach` gave, or ``None``."""
    found: Moments | None = getattr(optimizer, _ATTRIBUTE, None)
    return found


def from_the_first_step_on(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``DistributedOptimizer.state_dict``, for which a fresh Adam of torch has a state."""

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        moments = moments_of(self)
        if moments is not None and is_torch_adam(self.optimizer):
            moments.begin_all()
        return original(self, *args, **kwargs)

    return state_dict


def into_places(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``load_state_dict`` of Megatron's optimizers."""

    def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        moments = moments_of(self)
        if moments is None:
            return original(self, state_dict, *args, **kwargs)
        moments.begin_all()  # else Megatron makes some on the device
        with moments.loading():
            return original(self, state_dict, *args, **kwargs)

    return load_state_dict
