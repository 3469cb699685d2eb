"""Where the gradient of a stack of weights goes: into ``main_grad`` where there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.ops.grouped_matmul import WeightGradient
from mindspeed_dsa.parallel.weight_gradients import placeholder


def gradient_receiver(weight: Any, megatron: Megatron) -> Callable[[WeightGradient], Tensor | None] | None:
    """What to do with the weight's gradient in backward; ``None``: give it to autograd.

    Megatron's data parallelism has a buffer ``main_grad`` for every parameter and a mark that says that the
    gradient is in it already, for which Megatron's linear layers need a fused kernel. All contributions to a
    parameter must go one way; those of a stack have but one origin.

    Args:
        weight: the parameter; its ``main_grad`` of now is kept for backward.
        megatron: see :func:`placeholder`.
    """
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None or not hasattr(weight, "grad_added_to_main_grad"):
        return None

    def add(gradient: WeightGradient) -> Tensor | None:
        gradient.add_to(main_grad)
        return placeholder(weight, weight.dtype, megatron)

    return add
