"""Process groups, which these releases pass under two names or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed import ProcessGroup

from mindspeed_dsa.feature import Megatron


@dataclass(frozen=True)
class Groups:
    """The process groups that DSA uses, with the names of Megatron's ``ProcessGroupCollection``."""

    tp: ProcessGroup
    cp: ProcessGroup

    @classmethod
    def of(cls, megatron: Megatron, given: Any = None) -> Groups:
        """The groups passed to a module (0.13 and later), else Megatron's global ones."""
        state = megatron("core.parallel_state")
        tp, cp = getattr(given, "tp", None), getattr(given, "cp", None)
        return cls(
            tp=state.get_tensor_model_parallel_group() if tp is None else tp,
            cp=state.get_context_parallel_group() if cp is None else cp,
        )
