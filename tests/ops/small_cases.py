"""Small operators against Megatron's code: results, gradients, saved bytes and dispatched operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_dsa.ops.rms_norm import rms_norm
from mindspeed_dsa.ops.rotary import Rotation, rotate, rotation
from mindspeed_dsa.ops.swiglu import swiglu

Function = Callable[..., Tensor]


class Dispatched(TorchDispatchMode):
    """Records the names of dispatched operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@dataclass
class Found:
    """Result of a function, forward and backward.

    Attributes:
        tensors: the output, then the gradients of all inputs.
        kept: bytes of the tensors saved for backward.
        dispatched: number of dispatched operations, forward and backward.
    """

    tensors: list[Tensor]
    kept: int
    dispatched: int


@dataclass
class Case:
    """An operator and the same function in Megatron.

    Attributes:
        ours: function of the inputs and ``backend``.
        theirs: Megatron's function of the inputs.
        inputs: shapes of the inputs; the first input has the dtype of the case.
        same_bits: whether outputs, and gradients, are bit-identical on CPUs.
        wide: indices of inputs that stay in fp32.
    """

    ours: Function
    theirs: Function
    inputs: Sequence[tuple[int, ...]]
    same_bits: tuple[bool, bool]
    wide: Sequence[int] = field(default=())

    def run(self, function: Function, dtype: torch.dtype) -> Found:
        """Run forward and backward on seeded inputs."""
        generator = torch.Generator().manual_seed(3)
        leaves = []
        for place, shape in enumerate(self.inputs):
            kind = torch.float32 if place in self.wide else dtype
            leaves.append(torch.randn(shape, generator=generator).to(kind).requires_grad_())
        kept: dict[Any, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.data_ptr(), tensor.dtype, tensor.shape] = tensor.numel() * tensor.element_size()
            return tensor

        seen = Dispatched()
        # Run Megatron's torch.compile functions eagerly.
        with torch.compiler.set_stance("force_eager"):
            function(*leaves)  # warm-up call, for objects that are made once and cached
            with seen, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                output = function(*leaves)
        gradient = torch.randn(output.shape, generator=generator).to(output.dtype)
        with seen:
            output.backward(gradient)
        gradients = [leaf.grad for leaf in leaves]
        assert all(gradient is not None for gradient in gradients)
        return Found([output.detach(), *gradients], sum(kept.values()), len(seen.names))  # type: ignore[list-item]


def _angles(rows: int, width: int, layout: str) -> Tensor:
    half = torch.randn(rows, 1, 1, width // 2, generator=torch.Generator().manual_seed(9))
    doubled = (half, half)
    return torch.stack(doubled, -1).flatten(-2) if layout == "pairs" else torch.cat(doubled, -1)


def _rotary(layout: Any, dim: int, scale: float = 1.0, width: int = 16, rows: int = 9) -> Case:
    angles = _angles(rows, width, layout)
    latent, interleaved = layout == "pairs to halves", layout == "pairs"

    @cache
    def tables(dtype: torch.dtype, backend: str) -> Rotation:
        return rotation(angles, scale, layout, torch.empty(rows, 2, 3, dim, dtype=dtype), backend)

    def ours(tensor: Tensor, backend: str = "auto") -> Tensor:
        return rotate(tensor, tables(tensor.dtype, backend))

    def theirs(tensor: Tensor) -> Tensor:
        from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

        return _apply_rotary_pos_emb_bshd(tensor, angles, interleaved, latent, scale)

    return Case(ours, theirs, [(rows, 2, 3, dim)], (True, True))


def cases() -> dict[str, Case]:
    """Return all cases by name."""

    def norm(hidden: Tensor, weight: Tensor, backend: str = "auto") -> Tensor:
        return rms_norm(hidden, weight, 1e-5, backend=backend)

    def norm_of_torch(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, 1e-5)

    def bias_swiglu(gate_up: Tensor, bias: Tensor | None = None) -> Tensor:
        from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

        return bias_swiglu_impl(gate_up, bias)

    def weighted_swiglu(gate_up: Tensor, probs: Tensor) -> Tensor:
        from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl

        return weighted_bias_swiglu_impl(gate_up, None, probs)

    def weighted(gate_up: Tensor, probs: Tensor, backend: str = "auto") -> Tensor:
        return swiglu(gate_up, scale=probs, backend=backend)

    return {
        "norm": Case(norm, norm_of_torch, [(5, 3, 48), (48,)], (False, False)),
        "norm, weight in fp32": Case(norm, norm_of_torch, [(5, 3, 48), (48,)], (False, False), wide=(1,)),
        "swiglu": Case(swiglu, bias_swiglu, [(7, 2, 32)], (True, False)),
        "swiglu with a bias": Case(swiglu, bias_swiglu, [(7, 2, 32), (32,)], (True, False)),
        "swiglu by probabilities": Case(
            weighted, weighted_swiglu, [(11, 32), (11, 1)], (True, False), wide=(1,)
        ),
        "rotary": _rotary("halves", 16),
        "rotary, a part of each head, YaRN": _rotary("halves", 24, scale=1.37),
        "rotary, neighbours": _rotary("pairs", 16),
        "rotary, latent attention": _rotary("pairs to halves", 16),
        "rotary, latent attention, YaRN": _rotary("pairs to halves", 16, scale=1.37),
    }
