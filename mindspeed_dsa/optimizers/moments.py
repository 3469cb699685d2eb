"""Adam's moments in memory that the optimizer did not allocate.

Moments can be relocated for every Adam: torch, Apex and Transformer Engine all name them ``exp_avg`` and
``exp_avg_sq``, and in the first step allocate them only for parameters without state. So it suffices to fill
the state with our own tensors before the first step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.parallel.local_shards import local_of
from mindspeed_dsa.patches.errors import SettingsError

MOMENTS = ("exp_avg", "exp_avg_sq")


def is_torch_adam(optimizer: Any) -> bool:
    """Return whether the optimizer is torch's Adam or AdamW."""
    return isinstance(optimizer, torch.optim.Adam)  # AdamW's base as well


class Moments:
    """Moments of one optimizer, in preallocated memory.

    Args:
        optimizer: torch-style Adam.
        places: preallocated fp32 ``(exp_avg, exp_avg_sq)`` per parameter, zeroed, shard-shaped under
            sharding. Parameters not listed keep the optimizer's default allocation.
        write: ``write(target, values)``, replacement for ``Tensor.copy_`` if that cannot write this memory.

    Attributes:
        optimizer: Adam.
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
        return self.start(parameter)

    def moved(self) -> list[tuple[dict[str, Any], str, Tensor]]:
        """Return moments that another library has put elsewhere: state, key and preallocated tensor."""
        return [
            (self.optimizer.state[parameter], key, place)
            for parameter, places in self.places.items()
            for key, place in places.items()
            if self.optimizer.state.get(parameter, places).get(key, place) is not place
        ]

    @torch.no_grad()
    def take_back(self) -> None:
        """Copy :meth:`moved` moments back, for example after verl's ``optimizer_offload``."""
        for state, key, place in self.moved():
            self._write(local_of(place), local_of(state[key]))
            state[key] = place

    def begin_step(self) -> None:
        """Call :meth:`begin` for all parameters with a gradient."""
        self.take_back()
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.begin(parameter, group)

    def begin_all(self) -> None:
        """Call :meth:`begin` for all parameters."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                self.begin(parameter, group)

    @contextlib.contextmanager
    def loading(self, remedy: str) -> Iterator[None]:
        """Make the optimizer's ``load_state_dict`` copy moments directly into the preallocated tensors.

        Args:
            remedy: advice for the user if a state dict has moments without a count of steps.
        """
        # torch's method first copies all of them to the device of the parameters.
        load = partial(self.load, self.optimizer.load_state_dict, remedy)
        with replaced(self.optimizer, "load_state_dict", load):
            yield

    @torch.no_grad()
    def load(self, original: Callable[[Any], Any], remedy: str, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict, copying moments directly into the preallocated tensors.

        Args:
            original: optimizer's own ``load_state_dict``.
            remedy: advice for the user if the state dict has moments without a count of steps.
            state_dict: state dict of such an optimizer.

        Raises:
            SettingsError: the state dict has moments without a count of steps.
        """
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
                f"this checkpoint has moments and no count of steps, and Adam would begin at 0: {remedy}"
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

    def start(self, parameter: Tensor) -> dict[str, Any]:
        """Return the parameter's state, with moments but without a count of steps if it is empty."""
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
