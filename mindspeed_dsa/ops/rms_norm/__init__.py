"""RMSNorm: ``y = x / sqrt(mean(x ** 2) + eps) * weight``, over the last axis."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass, choose, count_call, plan, unless_empty
from mindspeed_dsa.ops.checks import require
from mindspeed_dsa.ops.rms_norm.backends import Norm, Reference

OPERATOR = "rms_norm"
_REFERENCE = Reference()  # made here: a graph cannot make an object of an abstract class


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, *, backend: str = "auto") -> Tensor:
    """Normalize the last axis, in fp32 for 16-bit tensors.

    The input and one number per row are saved for backward, which recomputes the normalized rows.

    Args:
        hidden: ``[..., n]``; fp32, bf16, fp16 or fp64.
        weight: ``[n]`` in any floating dtype.
        eps: number added to the mean of squares.
        backend: name, see :data:`mindspeed_dsa.ops.backend.BackendName`.

    Returns:
        ``[..., n]`` in the dtype of ``hidden``.

    Raises:
        ValueError: shapes do not fit.
        BackendUnavailable: the requested backend cannot take the call.
    """
    if torch.compiler.is_compiling():  # the compiler fuses the reference's operations
        return _REFERENCE.rms_norm(hidden, weight, eps)
    require(
        weight.dim() == 1 and hidden.shape[-1:] == weight.shape,
        OPERATOR,
        lambda: (
            f"weight must have the last size of hidden, got {list(weight.shape)} and {list(hidden.shape)}"
        ),
    )
    selected: Norm = choose(OPERATOR, backend, ShapeClass.of(hidden, ("hidden", weight.shape[0])))
    selected = unless_empty(OPERATOR, selected, hidden)
    implementation, _ = plan(OPERATOR, backend, selected, selected.plan(hidden, weight))
    count_call(OPERATOR, implementation)
    return implementation.rms_norm(hidden, weight, eps)
