"""Optimizer ``npu_swap_optimizer``: Adam's moments on the host, and steps that copy them part by part.

TorchTitan builds its optimizers as always. :func:`swap_moments` then moves their moments, before the first
step. The model's fp32 weights stay on the device, so the host has two numbers for each of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mindspeed_dsa import platforms
from mindspeed_dsa.integrations.torchtitan.names import check_device
from mindspeed_dsa.optimizers.integrity import StepIntegrity
from mindspeed_dsa.optimizers.moments import Moments, is_torch_adam
from mindspeed_dsa.optimizers.step_pipeline import Parameter, Pipeline, Slab
from mindspeed_dsa.parallel.local_shards import local_of
from mindspeed_dsa.platforms import host_pool
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type

NAME = "npu_swap_optimizer"
DEFAULT_TIMES = 16
_WITHOUT_COUNT = "save the optimizer's whole state, or leave the optimizer out of loading"


class SwappedMoments:
    """Moments of one Adam on the host.

    Args:
        optimizer: torch's Adam or AdamW before its first step.
        times: number N of parts of a step; the parts on the device take at most 3 / N of the moments.

    Attributes:
        pipeline: pipeline that runs the optimizer's steps.
    """

    def __init__(self, optimizer: Any, times: int) -> None:
        parameters = [
            Parameter(parameter, index, None)
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        ]
        # Two moments of 4 bytes.
        nbytes = 8 * sum(parameter.piece.numel() for parameter in parameters)
        host_pool.require_host_memory(
            nbytes, NAME, f"use more ranks, fewer processes on a host, or leave out {NAME}"
        )
        slab = Slab(parameters)
        places = {}
        for parameter in parameters:
            first, second = (on_host(parameter.main, moment) for moment in slab.of(parameter))
            places[parameter.main] = first, second
        self._moments = Moments(optimizer, places)
        self.pipeline = Pipeline(optimizer, [slab], self._moments, times, StepIntegrity(NAME))
        self._optimizer = optimizer
        self._step, self._load = optimizer.step, optimizer.load_state_dict
        optimizer.register_state_dict_pre_hook(self._before_saving)

        def step(optimizer: Any, closure: None = None) -> None:
            self.step()

        # A method of the optimizer: learning rate schedulers wrap its function.
        optimizer.step = MethodType(step, optimizer)
        optimizer.load_state_dict = self.load_state_dict

    @torch.no_grad()
    def step(self) -> None:
        """Run the optimizer's step through the pipeline."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                # torch's step would sum a partial gradient in each of its operations.
                if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
                    parameter.grad = gradient.redistribute(placements=parameter.placements)
        self.pipeline.step(self._step)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; moments are copied to the host without a copy on the device."""
        self.pipeline.settle()
        self._moments.load(self._load, _WITHOUT_COUNT, state_dict)
        self.pipeline.integrity.all_loaded()

    def _before_saving(self, optimizer: Any) -> None:
        self.pipeline.integrity.require()
        self.pipeline.settle()


def on_host(parameter: Tensor, values: Tensor) -> Tensor:
    """Return host memory as a tensor like a parameter.

    Args:
        parameter: tensor, or DTensor.
        values: fp32 tensor on the host, with the shape of the parameter's local tensor.

    Returns:
        ``values``, or a DTensor with the parameter's mesh and placements, whose local tensor is ``values``.
    """
    if not isinstance(parameter, DTensor):
        return values
    # `DTensor.from_local` would copy the values to the mesh's device; an operator on a DTensor does not.
    host = torch.empty_like(parameter, dtype=values.dtype, device="cpu", requires_grad=False)
    local_of(host).data = values
    return host


def swap_moments(optimizers: Iterable[Any], times: int) -> list[SwappedMoments]:
    """Move the moments of optimizers to the host.

    Args:
        optimizers: optimizers before their first step.
        times: number N of parts of a step, see :class:`SwappedMoments`.

    Raises:
        ValueError: an optimizer or a parameter has another kind of state.
        SettingsError: the host has too little free memory.
    """
    optimizers = list(optimizers)
    check_device(NAME, device_type)
    check_times(times)
    for optimizer in optimizers:
        check_optimizer(optimizer)
    swapped = [SwappedMoments(optimizer, times) for optimizer in optimizers]
    nbytes = sum(8 * local_of(each).numel() for optimizer in optimizers for each in _parameters(optimizer))
    logger.info(
        f"{NAME}: {nbytes / 2**30:.3f} GiB of moments on the host; a step takes up to "
        f"{3 * nbytes / times / 2**30:.3f} GiB of the device for parts of them"
    )
    return swapped


def check_times(times: int) -> None:
    """Raise ``ValueError`` unless a step can have this number of parts."""
    if times < 1:
        raise ValueError(f"{NAME}: times is {times}: a step has at least one part; use 1 or more")


def check_optimizer(optimizer: Any) -> None:
    """Raise ``ValueError`` if an optimizer's state is anything but two fp32 moments on the device."""
    if not is_torch_adam(optimizer):
        raise ValueError(
            f"{NAME}: {type(optimizer).__qualname__} is another optimizer than torch's Adam or AdamW; choose "
            f"one of them for all parameters, or leave out {NAME}"
        )
    for option, effect in (
        ("amsgrad", "adds a third moment"),
        ("capturable", "records steps in graphs, which do not repeat copies"),
        ("differentiable", "keeps the graph of a step"),
    ):
        if any(group[option] for group in optimizer.param_groups):
            raise ValueError(f"{NAME}: {option} {effect}; leave out {option} or {NAME}")
    for parameter in _parameters(optimizer):
        if parameter.dtype is not torch.float32:
            raise ValueError(
                f"{NAME}: weights in {parameter.dtype} have moments in {parameter.dtype}, and {NAME} has "
                f"fp32; set training.dtype to float32, or leave out {NAME}"
            )
        if parameter.device.type != platforms.current().device_type:
            raise ValueError(
                f"{NAME}: with weights on {parameter.device.type!r} the moments are there already; leave out "
                f"training.enable_cpu_offload or {NAME}"
            )


def _parameters(optimizer: Any) -> Iterable[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
