"""Functions that backward runs again, where none of their inputs wants a gradient and some weights do.

Autograd calls the backward of a reentrant checkpoint only where an input of the function wants a gradient:
behind a frozen embedding none does, and no weight of a recomputed layer would get a gradient. There one of
the inputs is made to want one. What lies before it gets none. Megatron's ``CheckpointWithoutOutput`` is such
a function too; there, moreover, what no input wants a gradient of cannot be computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_map_only


def checkpoint_learning(
    checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Checkpoint a function so that its weights learn whatever its inputs want.

    Where no module that the function calls has a weight that wants a gradient, the outputs want none.

    Args:
        checkpoint: Megatron's, or one that is called as such: runs the function without a graph, and again in
            backward.
        function: takes those of ``args`` that are tensors, among others.
        *args: arguments of the checkpoint behind the function.
        **kwargs: likewise.

    Returns:
        The checkpoint's outputs.
    """
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    at = next((at for at, each in enumerate(args) if _may_want(each)), None)
    if at is None or not torch.is_grad_enabled() or any(each.requires_grad for each in tensors):
        return checkpoint(function, *args, **kwargs)
    run = _Watched(function)
    wanting = args[at].detach().requires_grad_()
    outputs = checkpoint(run, *args[:at], wanting, *args[at + 1 :], **kwargs)
    return outputs if run.learns else tree_map_only(Tensor, Tensor.detach, outputs)


def learn_without_output(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``checkpoint`` of Megatron's ``CheckpointWithoutOutput``."""

    def checkpoint(self: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return checkpoint_learning(partial(original, self), _ending_in_leaves(run_function), *args)

    return checkpoint


def _ending_in_leaves(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, all of whose outputs take a gradient from its second run on.

    Megatron's class hands each of them one, which is an error where neither inputs nor weights of an output
    want it.
    """
    has_run = False

    def run(*args: Any) -> Any:
        nonlocal has_run
        outputs = function(*args)
        if has_run:
            tree_map_only(Tensor, Tensor.requires_grad_, outputs)
        has_run = True
        return outputs

    return run


def _may_want(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class _Watched:
    """Function of which is noted, in its first run, whether modules that it calls have weights that learn.

    Attributes:
        learns: whether one has.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._has_run = self.learns = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._has_run:
            return self._function(*args, **kwargs)
        self._has_run = True

        def look(module: nn.Module, _: Any) -> None:
            if not self.learns and any(each.requires_grad for each in module.parameters()):
                self.learns = True
                hook.remove()  # those inside of it are not asked

        hook = register_module_forward_pre_hook(look)
        try:
            return self._function(*args, **kwargs)
        finally:
            hook.remove()
