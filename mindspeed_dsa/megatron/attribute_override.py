"""Views of modules with overridden attributes, to be passed as ``self`` to Megatron's own methods.

To run a Megatron method with one submodule exchanged, it is called on a view with that submodule replaced.
The method's body need not be copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn


class Function(nn.Module):
    """Module that calls a function. Megatron-core since 0.17 accepts only modules where it expects layers.

    Args:
        function: function to call. A bound method of the object that stores this module creates a
            reference cycle.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any) -> Any:
        """Call the function."""
        return self._function(*args)


class AttributeOverride:
    """View of a module with some attributes replaced.

    Args:
        module: module that provides all other attributes.
        replaced: attributes to replace.
    """

    def __init__(self, module: Any, **replaced: Any) -> None:
        # Bypasses __setattr__; __getattr__ is called only for names that are not in this dictionary.
        vars(self).update(replaced, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextlib.contextmanager
def attributes(module: Any, **values: Any) -> Iterator[None]:
    """Set attributes of a module inside the block."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def activation_of(
    forward: Callable[..., Any], mlp: Any, bias: Tensor | None, kwargs: Mapping[str, Any]
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return a function for the part of ``MLP.forward`` between fc1 and fc2, including Megatron's fusions.

    Args:
        forward: Megatron's ``MLP.forward``.
        mlp: MLP module.
        bias: bias of fc1.
        kwargs: further arguments of the forward.

    Returns:
        Function of fc1's output ``[..., ffn or 2 * ffn]`` and the scale of each token, which returns
        ``[..., ffn]``.
    """

    # fc1 is already computed and fc2 comes later, so both are replaced by functions that pass their input on.
    def first(intermediate: Tensor) -> tuple[Tensor, Tensor | None]:
        return intermediate, bias

    def second(activation: Tensor) -> tuple[Tensor, None]:
        return activation, None

    between = AttributeOverride(mlp, linear_fc1=Function(first), linear_fc2=Function(second))

    def activation(intermediate: Tensor, scale: Tensor | None) -> Tensor:
        output: Tensor = forward(between, intermediate, scale, **kwargs)[0]
        return output

    return activation
