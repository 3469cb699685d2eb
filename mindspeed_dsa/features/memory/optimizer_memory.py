"""State of Megatron's optimizers in memory that they did not allocate: moments, freed master weights.

If the values of a master weight are stored elsewhere, its tensor remains, but without memory. Megatron and
the optimizer use the tensor as a key, for example into the optimizer's state. See :class:`FreedStorage`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.megatron.optimizer import OptimizerState, is_sharded
from mindspeed_dsa.optimizers.integrity import StepIntegrity
from mindspeed_dsa.optimizers.moments import Moments, is_torch_adam
from mindspeed_dsa.parallel.local_shards import local_of

_WITHOUT_COUNT = (
    "Megatron writes the count of rank 0 alone, whose pipeline stage has no such parameters; put some in the "
    "first stage when it is saved, or add --no-load-optim to load the weights alone"
)


class StateWithMoments(OptimizerState):
    """State of an optimizer with relocated moments.

    Attributes:
        moments: moments of the inner optimizer.
    """

    def __init__(self, optimizer: Any, moments: Moments, integrity: StepIntegrity) -> None:
        self.moments, self.integrity = moments, integrity
        self._is_sharded = is_sharded(optimizer)
        optimizer.init_state_fn = self._init_state

    def state_dict(self, call: Callable[[], Any]) -> Any:
        if self._is_sharded and is_torch_adam(self.moments.optimizer):
            # Megatron reads the step count of torch's Adam even before the first step.
            self.moments.begin_all()
        return call()

    def load_state_dict(self, call: Callable[[], Any]) -> Any:
        """Load the state, copying moments directly into the preallocated tensors."""
        self.moments.begin_all()  # otherwise Megatron allocates moments on the device
        with self.moments.loading(_WITHOUT_COUNT):
            return call()

    def _init_state(self, optimizer: Any, config: Any = None) -> None:
        """Create the moments of all parameters; replaces Megatron's ``init_state_fn``."""
        # Without `step`: Megatron's own function creates the moments only.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not optimizer.state[parameter]:
                    self.moments.start(parameter)


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
