"""Megatron's own methods on a module of which some attributes are overridden.

A method that does what is wanted but for one of its parts runs on a view of the module that has that part
replaced: nothing of its body is copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn


class Function(nn.Module):
    """Function in the place of a layer, where releases since 0.17 accept modules alone.

    Args:
        function: what a call does. An object that keeps a module of its own method keeps itself alive.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any) -> Any:
        """Return what the function returns."""
        return self._function(*args)


class AttributeOverride:
    """View of a module, as ``self`` of a method of Megatron's; what is not replaced is the module's.

    Args:
        module: the module.
        replaced: attributes that differ.
    """

    def __init__(self, module: Any, **replaced: Any) -> None:
        vars(self).update(replaced, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextlib.contextmanager
def switched_off(module: Any, name: str) -> Iterator[None]:
    """Run the block with an attribute of a module false."""
    before = getattr(module, name)
    setattr(module, name, False)
    try:
        yield
    finally:
        setattr(module, name, before)


def activation_of(
    forward: Callable[..., Any], mlp: Any, bias: Tensor | None, kwargs: Mapping[str, Any]
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Build the part of ``MLP.forward`` between fc1 and fc2, with every fusion that it has.

    Args:
        forward: Megatron's ``MLP.forward``.
        mlp: the module.
        bias: of fc1.
        kwargs: other arguments of the forward.

    Returns:
        A function of fc1's output, ``[..., ffn or 2 * ffn]``, and the scale of each token.
    """

    def first(intermediate: Tensor) -> tuple[Tensor, Tensor | None]:
        return intermediate, bias

    def second(activation: Tensor) -> tuple[Tensor, None]:
        return activation, None

    between = AttributeOverride(mlp, linear_fc1=Function(first), linear_fc2=Function(second))

    def activation(intermediate: Tensor, scale: Tensor | None) -> Tensor:
        output: Tensor = forward(between, intermediate, scale, **kwargs)[0]
        return output

    return activation
