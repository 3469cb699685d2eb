"""SwiGLU: ``silu(gate) * up`` on concatenated ``[gate, up]``, with optional bias and per-row scale."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass, choose, count_call, unless_empty
from mindspeed_dsa.ops.checks import require
from mindspeed_dsa.ops.swiglu.backends import Reference, SwiGLU

OPERATOR = "swiglu"
_REFERENCE = Reference()  # made here: a graph cannot make an object of an abstract class


def swiglu(
    gate_up: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, *, backend: str = "auto"
) -> Tensor:
    """Return ``silu(gate) * up * scale``, where ``[gate, up] = gate_up + bias``.

    Only the arguments are saved for backward.

    Args:
        gate_up: ``[..., 2 * ffn]``; fp32, bf16, fp16 or fp64.
        bias: ``[2 * ffn]``, or None.
        scale: ``[..., 1]`` in any floating dtype, such as a router's probabilities, or None.
        backend: name, see :data:`mindspeed_dsa.ops.backend.BackendName`.

    Returns:
        ``[..., ffn]`` in the dtype of ``gate_up``.

    Raises:
        ValueError: a shape does not fit.
        BackendUnavailable: the requested backend cannot take the call.
    """
    if torch.compiler.is_compiling():  # the compiler fuses the reference's operations
        return _REFERENCE.swiglu(gate_up, bias, scale)
    width = gate_up.shape[-1]
    require(
        width % 2 == 0,
        OPERATOR,
        lambda: f"gate_up must have an even last size, got {list(gate_up.shape)}",
    )
    require(
        bias is None or bias.shape == (width,),
        OPERATOR,
        lambda: f"bias must be [{width}], got {None if bias is None else list(bias.shape)}",
    )
    require(
        scale is None or scale.shape == (*gate_up.shape[:-1], 1),
        OPERATOR,
        lambda: (
            f"scale must be {[*gate_up.shape[:-1], 1]}, got {None if scale is None else list(scale.shape)}"
        ),
    )
    selected: SwiGLU = choose(OPERATOR, backend, ShapeClass.of(gate_up, ("ffn", width // 2)))
    implementation = unless_empty(OPERATOR, selected, gate_up)
    count_call(OPERATOR, implementation)
    return implementation.swiglu(gate_up, bias, scale)
