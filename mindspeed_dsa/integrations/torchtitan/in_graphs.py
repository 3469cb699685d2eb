"""Our operators as single nodes of compiled graphs, which TorchTitan compiles without graph breaks.

Operators read tensors on the host and choose kernels, which no graph can record. In a graph, an operator is
therefore a call of one custom operator that runs the eager function, with autograd's own graph of it. That
graph lives as long as the memory of a small tensor, the *handle*, which the custom operator returns with
the function's results. The compiler saves or recomputes the handle like every other tensor. Backward is a
second custom operator, which takes the handle.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

Function = Callable[..., tuple[Tensor, ...]]
"""Function of a string and of tensors or ``None``."""


class Node(NamedTuple):
    """Function that graphs call without looking into it.

    Attributes:
        function: eager function. Its results share no memory with its arguments.
        shapes: function of the same arguments that returns empty tensors like the results, contiguous.
    """

    function: Function
    shapes: Function


_nodes: dict[str, Node] = {}
_numbered: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Objects that tensors in graphs stand for, by the tensors' value."""
_numbers = itertools.count()
# The state in eager code, outside of every operator. Autocast is off: a compiled graph has its casts.
_INCLUDED = torch._C._dispatch_tls_local_include_set()
_EXCLUDED = torch._C._dispatch_tls_local_exclude_set()


class _Graph(bytearray):
    """Memory of a handle, with autograd's graph of one call."""

    inputs: list[Tensor]
    outputs: list[Any]
    """Edge of each floating-point result to its node; ``None`` for a result without a gradient."""


class _Call(NamedTuple):
    """Call of a node, as one string: the compiler takes strings for constants."""

    name: str
    static: str
    given: str
    """``1`` for each argument that is a tensor, and ``0`` for each that is ``None``."""
    needs: str
    """``1`` for each tensor that needs a gradient."""

    def spread(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the node's arguments for the tensors among them."""
        rest = iter(tensors)
        return [next(rest) if given == "1" else None for given in self.given]


def call_in_graph(name: str, static: str, *arguments: Tensor | None) -> tuple[Tensor, ...]:
    """Call a node from code that is compiled.

    Args:
        name: name of the node in :func:`node`.
        static: first argument of the node's function.
        *arguments: other arguments.

    Returns:
        Results of the node's function.
    """
    tensors = [x for x in arguments if x is not None]
    given = "".join("0" if x is None else "1" for x in arguments)
    needs = "".join("1" if torch.is_grad_enabled() and x.requires_grad else "0" for x in tensors)
    *results, _ = torch.ops.mindspeed_dsa.call("|".join((name, static, given, needs)), tensors)
    return tuple(results)


def number(thing: Any) -> int:
    """Give an object a number, by which :func:`numbered` finds it while it lives."""
    value = next(_numbers)
    _numbered[value] = thing
    return value


def numbered(value: Tensor) -> Any:
    """Return the object with a number, ``[1]`` int64 on the host."""
    return _numbered[int(value)]


def node(name: str, function: Function, shapes: Function) -> None:
    """Declare a node; see :class:`Node`."""
    _nodes[name] = Node(function, shapes)


def _eager() -> AbstractContextManager[None]:
    """Return a context inside of a custom operator, in which autograd makes a graph of eager code."""
    guard: AbstractContextManager[None] = torch._C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED)
    return guard


@torch.library.custom_op(
    "mindspeed_dsa::call", mutates_args=(), schema="(str call, Tensor[] tensors) -> Tensor[]"
)
def _run(call: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    made = _Call(*call.split("|"))
    with _eager(), torch.set_grad_enabled("1" in made.needs):
        inputs = [x.detach().requires_grad_(need == "1") for x, need in zip(tensors, made.needs, strict=True)]
        results = _nodes[made.name].function(made.static, *made.spread(inputs))
        graph = _Graph(8)
        if "1" in made.needs:
            graph.inputs = [x for x in inputs if x.requires_grad]
            graph.outputs = [
                torch.autograd.graph.get_gradient_edge(x) if x.requires_grad else None
                for x in results
                if x.is_floating_point()
            ]
    graph[:] = number(graph).to_bytes(8, sys.byteorder)
    # The tensor's memory is the graph, which ends with it.
    return [*(x.detach() for x in results), torch.frombuffer(graph, dtype=torch.int64)]


@_run.register_fake
def _(call: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    made = _Call(*call.split("|"))
    results = _nodes[made.name].shapes(made.static, *made.spread(tensors))
    return [*results, torch.empty(1, dtype=torch.int64, device="cpu")]


@torch.library.custom_op(
    "mindspeed_dsa::gradients",
    mutates_args=(),
    schema="(str call, Tensor handle, Tensor[] tensors, Tensor[] grads) -> Tensor[]",
)
def _gradients(call: str, handle: Tensor, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    graph = numbered(handle)
    pairs = [(edge, grad) for edge, grad in zip(graph.outputs, grads, strict=True) if edge is not None]
    with _eager(), torch.enable_grad():
        gradients = torch.autograd.grad(
            [edge for edge, _ in pairs], graph.inputs, [grad for _, grad in pairs], allow_unused=True
        )
    # A result must not share memory with an argument or with another result.
    taken = {x.untyped_storage().data_ptr() for x in (*tensors, *grads)}
    results = []
    for x, grad in zip(graph.inputs, gradients, strict=True):
        result = x.new_zeros(x.shape) if grad is None else grad.contiguous()
        if result.untyped_storage().data_ptr() in taken:
            result = result.clone()
        taken.add(result.untyped_storage().data_ptr())
        results.append(result)
    return results


@_gradients.register_fake
def _(call: str, handle: Tensor, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    needs = _Call(*call.split("|")).needs
    return [x.new_empty(x.shape) for x, need in zip(tensors, needs, strict=True) if need == "1"]


def _save(ctx: Any, inputs: tuple[str, list[Tensor]], output: list[Tensor]) -> None:
    ctx.call, tensors = inputs
    ctx.save_for_backward(output[-1], *tensors)
    ctx.are_floats = [x.is_floating_point() for x in output[:-1]]


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[None, list[Tensor | None]]:
    handle, *tensors = ctx.saved_tensors
    floats = [grad for grad, is_float in zip(grads, ctx.are_floats, strict=False) if is_float]
    found = iter(torch.ops.mindspeed_dsa.gradients(ctx.call, handle, tensors, floats))
    needs = _Call(*ctx.call.split("|")).needs
    return None, [next(found) if need == "1" else None for need in needs]


_run.register_autograd(_backward, setup_context=_save)
