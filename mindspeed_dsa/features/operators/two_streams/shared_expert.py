"""The shared expert beside the router and the experts: its output is awaited where it is added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.operators.two_streams import side
from mindspeed_dsa.megatron.shared_expert import SharedOutput


class _Beside(SharedOutput):
    """What the second stream computes."""

    def __init__(self, started: side.Started) -> None:
        self._started = started

    @property
    def tensor(self) -> Tensor:
        """The output, for the current stream."""
        return self._started.wait()[0]


def compute_beside(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Decorate ``MoELayer.shared_experts_compute``."""

    def shared_experts_compute(self: Any, hidden_states: Tensor) -> Any:
        if not self.use_shared_expert or self.shared_expert_overlap:
            return original(self, hidden_states)
        if self.config.tensor_model_parallel_size > 1:
            context.log.info(
                "the shared expert runs in its turn: it communicates with tensor parallel ranks",
                once=True,
            )
            return original(self, hidden_states)
        return _Beside(
            side.start(lambda: (original(self, hidden_states),), hidden_states, self.shared_experts)
        )

    return shared_experts_compute
