"""Reentrant checkpoints whose weights get gradients even if no input requires one.

Autograd calls the backward of a reentrant checkpoint only if one of its inputs requires a gradient. After a
frozen embedding none does, so the weights of a recomputed layer would get no gradient. In this case one input
is replaced by a detached copy that requires a gradient. Earlier layers get no gradient through it.

Megatron's ``CheckpointWithoutOutput`` has the same limitation. In addition, it fails on outputs that need no
gradient.
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
    """Checkpoint a function so that its weights get gradients even if no input requires one.

    If no module that the function calls has a weight that requires a gradient, the outputs require none.

    Args:
        checkpoint: Megatron's checkpoint, or a function with its signature. Runs the function without a
            graph, and again in backward.
        function: function to checkpoint.
        *args: arguments of the checkpoint after the function.
        **kwargs: keyword arguments of the checkpoint.

    Returns:
        The checkpoint's outputs.
    """
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    index = next((number for number, value in enumerate(args) if _may_want(value)), None)
    if index is None or not torch.is_grad_enabled() or any(tensor.requires_grad for tensor in tensors):
        return checkpoint(function, *args, **kwargs)
    run = _Watched(function)
    # detach() so that the gradient, which is discarded, is not propagated to the caller's tensor.
    wanting = args[index].detach().requires_grad_()
    outputs = checkpoint(run, *args[:index], wanting, *args[index + 1 :], **kwargs)
    return outputs if run.learns else tree_map_only(Tensor, Tensor.detach, outputs)


def learn_without_output(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``CheckpointWithoutOutput.checkpoint``: support inputs that require no gradient."""

    def checkpoint(self: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return checkpoint_learning(partial(original, self), _ending_in_leaves(run_function), *args)

    return checkpoint


def _ending_in_leaves(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that in the recomputation all its outputs require a gradient."""
    # Megatron's class passes a gradient to each output, which is an error for an output that depends on no
    # input or weight that requires one.
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
    """Function wrapper that records, in the first call, whether a called module has trainable weights.

    Attributes:
        learns: whether such a module was called.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._has_run = self.learns = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Backward calls the function again; the answer is already known then.
        if self._has_run:
            return self._function(*args, **kwargs)
        self._has_run = True

        def look(module: nn.Module, _: Any) -> None:
            if not self.learns and any(each.requires_grad for each in module.parameters()):
                self.learns = True
                hook.remove()  # the answer is known, so inner modules need not be checked

        # A global hook, because the function is opaque: its modules are known only when they are called.
        hook = register_module_forward_pre_hook(look)
        try:
            return self._function(*args, **kwargs)
        finally:
            hook.remove()
