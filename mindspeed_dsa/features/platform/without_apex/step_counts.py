"""Fixes for ``DistributedOptimizer`` with torch's Adam or with float32 weights.

Megatron uses ``torch.optim.Adam`` if neither Transformer Engine nor Apex is installed. This causes four
bugs:

* Resuming fails, because Megatron first reads the new optimizer's state, in which no parameter has a step
  count yet.
* Loading moments fails in the checkpoint formats without step counts. In the format with step counts
  (``dp_reshardable``) it overwrites the loaded count with the new optimizer's 0.
* Saving in that format fails in 0.15, which takes the count for a slice of the buffer.
* After loading, all parameters share one tensor as their step count. torch increments it in place once per
  parameter, so Adam's bias corrections are silently wrong.

With float32 weights, the shards that the optimizer updates are views of the weights. Loading into them fails
because they require gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_dsa.optimizers.moments import Moments, is_torch_adam

_Function = Callable[..., Any]


def start_state(original: _Function) -> _Function:
    """Decorate ``state_dict`` to create Adam's initial state if the optimizer has none."""

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_torch_adam(self.optimizer) and not self.optimizer.state:
            Moments(self.optimizer, {}).begin_all()
        return original(self, *args, **kwargs)

    return state_dict


def separate_step_counts(original: _Function) -> _Function:
    """Decorate ``load_state_dict`` to give every parameter its own step count tensor."""

    def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, state_dict, *args, **kwargs)
        if is_torch_adam(self.optimizer):
            for state in self.optimizer.state.values():
                if "step" in state:
                    state["step"] = state["step"].clone()
        return result

    return load_state_dict


def leave_out_step_counts(original: _Function) -> _Function:
    """Decorate ``get_parameter_state_dp_reshardable`` to leave out step counts, which this format lacks."""

    def get_parameter_state_dp_reshardable(self: Any) -> Any:
        state = original(self)
        if is_torch_adam(self.optimizer):
            # By buffer, dtype, bucket and parameter.
            for buffer in (state[index] for index in range(len(self.gbuf_ranges))):
                for parameter in itertools.chain.from_iterable(itertools.chain(*buffer.values())):
                    parameter.pop("step", None)
        return state

    return get_parameter_state_dp_reshardable


def keep_step_count(original: _Function) -> _Function:
    """Decorate ``_set_main_param_and_optimizer_states`` to keep the loaded step count."""

    def _set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: Any) -> Any:
        # The original copies `tensors` for all keys of the state, `step` included.
        if is_torch_adam(self.optimizer):
            group, place = self.model_param_group_index_map[model_param]
            state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
            tensors = {**tensors, "step": state["step"]}  # load_state_dict has set it already
        with torch.no_grad():
            return original(self, model_param, tensors)

    return _set_main_param_and_optimizer_states
