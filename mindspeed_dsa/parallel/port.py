"""A weight's gradient, computed at another place in backward than where its operands become known.

A port is a node of the graph between a weight and the functions that use it. Autograd runs ready nodes in the
reverse order of their creation, so the place where the port is opened in forward decides when the gradient is
computed in backward: opened between the start and the wait of a transfer, it is computed under the reverse
transfer. The weight's ``AccumulateGrad``, and with it every hook of data parallelism, runs after the port, as
often as without one.

A function takes part in three steps::

    port = port_of(weight)                      # in forward: None where nobody has opened one
    output = Function.apply(rows, port.edge, port)  # the edge stands for the weight in the graph
    return grad_rows, port.later(gradient), None    # in its backward, for the edge
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.parallel.weight_gradient import WeightGradient

Gradient = Callable[[], "Tensor | None"]
"""Computes what goes to the weight: its gradient, or a placeholder (or ``None``) if ``main_grad`` has it."""


class Port:
    """One weight's port in one forward.

    Attributes:
        weight: the parameter, of any shape.
        taken: whether a function has asked for it.
        edge: ``[0]``; a function that takes it depends on the weight.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.taken = False
        self._gradients: list[Gradient] = []
        self.edge: Tensor = _Port.apply(weight, self._gradients)

    def later(self, gradient: Gradient) -> Tensor:
        """Leave the gradient's computation here; several are added up.

        Returns:
            ``[0]``, what the caller's backward returns for :attr:`edge`.
        """
        self._gradients.append(gradient)
        return self.weight.new_empty(0)


class _Port(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradients: list[Gradient]) -> Tensor:
        ctx.gradients = gradients
        return weight.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, None]:
        total: Tensor | None = None
        while ctx.gradients:
            found = ctx.gradients.pop(0)()  # each lets go of its operands as soon as it is done
            if found is not None:  # else main_grad has it
                total = found if total is None else total + found
        return total, None


_NONE: Mapping[int, Port] = {}
_open: ContextVar[Mapping[int, Port]] = ContextVar("open ports", default=_NONE)


@contextlib.contextmanager
def opened(weights: Iterable[Tensor], port: Callable[[Tensor], Port] = Port) -> Iterator[Collection[Port]]:
    """Open ports of the weights that learn, for functions that are called in the block.

    A weight that none of them asks for takes its gradient as ever.

    Args:
        weights: parameters.
        port: makes one.
    """
    learning = [weight for weight in weights if weight.requires_grad] if torch.is_grad_enabled() else []
    ports = {id(weight): port(weight) for weight in learning}
    token = _open.set({**_open.get(), **ports})
    try:
        yield ports.values()
    finally:
        _open.reset(token)


def port_of(weight: Tensor) -> Port | None:
    """The port that is open for this weight, whose gradient the caller is going to leave there."""
    port = _open.get().get(id(weight))
    if port is not None:
        port.taken = True
    return port


def is_open(weight: Tensor) -> bool:
    """Whether :func:`port_of` would find a port; asking takes nothing."""
    return id(weight) in _open.get()


def linear(rows: Tensor, port: Port, bias: Tensor | None, fusion: bool, megatron: Megatron) -> Tensor:
    """``rows @ weight.T + bias``, whose weight's gradient goes through the port.

    The operands of the gradient stay until then: ``rows``, which backward needs anyway, and the gradient of
    the output.

    Args:
        rows: ``[..., in]``.
        port: of a weight ``[out, in]``.
        bias: ``[out]``.
        fusion: Megatron's ``gradient_accumulation_fusion``.
        megatron: whose fused kernels add to ``main_grad``.

    Returns:
        ``[..., out]``.
    """
    output: Tensor = _Linear.apply(rows, port.edge, bias, port, fusion, megatron)
    return output


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        edge: Tensor,
        bias: Tensor | None,
        port: Port,
        fusion: bool,
        megatron: Megatron,
    ) -> Tensor:
        ctx.save_for_backward(rows, port.weight)
        ctx.port, ctx.fusion, ctx.megatron = port, fusion, megatron
        ctx.main_grad = getattr(port.weight, "main_grad", None) if fusion else None
        output = torch.matmul(rows, port.weight.t())
        return output if bias is None else output + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        grad_rows = grad_output.matmul(weight) if ctx.needs_input_grad[0] else None
        flat, dtype = grad_output.reshape(-1, grad_output.size(-1)).contiguous(), rows.dtype
        grad_bias = flat.sum(dim=0) if ctx.needs_input_grad[2] else None
        kept = rows.reshape(-1, rows.size(-1)).contiguous()
        own, main_grad, fusion, megatron = ctx.port.weight, ctx.main_grad, ctx.fusion, ctx.megatron

        def gradient() -> Tensor | None:
            found = WeightGradient(own, kept, main_grad, fusion, megatron)
            found.add(flat, kept)
            return found.result(dtype)

        return grad_rows, ctx.port.later(gradient), grad_bias, None, None, None
