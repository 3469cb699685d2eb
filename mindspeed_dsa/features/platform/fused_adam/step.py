"""One step of torch's Adam by its fused implementation.

Only during the step do groups say so: state dicts, which hold groups too, are those of any other job.

Imports nothing of Megatron: fetched while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from mindspeed_dsa import log, platforms
from mindspeed_dsa.patches.versions import private


def step_in_one_operator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``step_with_ready_grads`` of Megatron's optimizers, in which the inner optimizer steps."""

    def step_with_ready_grads(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _fused(getattr(self, "optimizer", None)):
            return original(self, *args, **kwargs)

    return step_with_ready_grads


@contextmanager
def _fused(optimizer: Any) -> Iterator[None]:
    """Have torch's Adam or AdamW take its fused implementation in the block; nothing of other optimizers."""
    if _absent():
        log.get("fused-adam").warning(
            "--fused-adam: this torch_npu has no aten::_fused_adamw_; torch's step of many operators runs",
            once=True,
        )
        yield
        return
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        yield
        return
    groups = [group for group in optimizer.param_groups if _can_be_fused(group)]
    before = [{name: group.get(name) for name in ("fused", "foreach")} for group in groups]
    try:
        for group in groups:
            group.update(fused=True, foreach=False)
            for parameter in group["params"]:
                _count_steps_on_device(optimizer, parameter)
        yield
    finally:
        for group, values in zip(groups, before, strict=True):
            group.update(values)


@cache
def _absent() -> bool:
    """Return whether this job's device is an NPU whose torch_npu lacks the operators."""
    if platforms.current().name != "npu":
        return False
    has = private("torch._C:_dispatch_has_kernel_for_dispatch_key", "fused-adam")
    return not all(has(f"aten::{name}", "PrivateUse1") for name in ("_fused_adam_", "_fused_adamw_"))


def _can_be_fused(group: dict[str, Any]) -> bool:
    return not group.get("differentiable") and all(
        parameter.is_floating_point() and type(parameter.data) is torch.Tensor
        for parameter in group["params"]
    )


def _count_steps_on_device(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    """The operator reads the number of steps; an optimizer that was loaded has it on the host."""
    state = optimizer.state.get(parameter, {})
    count = state.get("step")
    if isinstance(count, torch.Tensor) and count.device != parameter.device:
        state["step"] = count.to(parameter.device, torch.float32)
