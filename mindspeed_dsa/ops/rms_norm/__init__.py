"""RMSNorm: ``y = x / sqrt(mean(x ** 2) + eps) * weight``, over the last axis."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass, choose, count_call, plan, unless_empty
from mindspeed_dsa.ops.checks import require
from mindspeed_dsa.ops.rms_norm.backends import Norm, Reference

OPERATOR = "rms_norm"


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, *, backend: str = "auto") -> Tensor:
    """Normalise the last axis, in fp32 where tensors have 16 bits.

    Backward keeps the input and one number for each row, and computes the normalised rows again.

    Args:
        hidden: ``[..., n]``; fp32, bf16, fp16 or fp64.
        weight: ``[n]`` of any floating dtype.
        eps: added to the mean of squares.
        backend: see :data:`mindspeed_dsa.ops.backend.BackendName`.

    Returns:
        ``[..., n]`` in the dtype of ``hidden``.

    Raises:
        ValueError: shapes do not fit.
        BackendUnavailable: the backend asked for cannot take the call.
    """
    if torch.compiler.is_compiling():  # which fuses the operations by itself
        return Reference().rms_norm(hidden, weight, eps)
    require(
        weight.dim() == 1 and hidden.shape[-1:] == weight.shape,
        OPERATOR,
        lambda: (
            f"weight must have the last size of hidden, got {list(weight.shape)} and {list(hidden.shape)}"
        ),
    )
    chosen: Norm = choose(OPERATOR, backend, ShapeClass.of(hidden, ("hidden", weight.shape[0])))
    chosen = unless_empty(OPERATOR, chosen, hidden)
    implementation, _ = plan(OPERATOR, backend, chosen, chosen.plan(hidden, weight))
    count_call(OPERATOR, implementation)
    return implementation.rms_norm(hidden, weight, eps)
