"""Access to sharded weights outside of their layer's forward, or on another stream than the layer's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any
from weakref import ref

_OVERLAPPED_GATHERING = "core.distributed.distributed_data_parallel"
"""Module whose hooks wait for weights under ``--overlap-param-gather``."""


def wait_for_weights(layer: Any) -> None:
    """Run a layer's forward pre-hooks that wait for the all-gather of its weights."""
    # Under overlapped parameter gathering Megatron waits for a layer's weights in such a hook. Without it,
    # the weights would still be the previous step's. A hook that was registered with_kwargs also gets the
    # (empty) keyword arguments.
    for number, hook in list(layer._forward_pre_hooks.items()):
        hook(layer, (), *([{}] if number in layer._forward_pre_hooks_with_kwargs else []))


def waits_for_weights(hook: Any) -> bool:
    """Return whether a forward pre-hook is Megatron's wait for the layer's weights."""
    return getattr(hook, "__module__", "").endswith(_OVERLAPPED_GATHERING)


def wait_for_all_weights(module: Any) -> None:
    """Make the current stream wait for the weights of a module and of its submodules."""
    # Megatron waits once per bucket of weights, on the stream of the first layer that needs the bucket.
    # Later layers do not wait again.
    for layer in module.modules():
        for hook in list(layer._forward_pre_hooks.values()):
            if waits_for_weights(hook):
                hook(layer, ())


# -- weights that are gathered for a call of their module, and resharded after it -----------------------

_HOLDER, _REDUCTION = "_mindspeed_dsa_holder", "_mindspeed_dsa_reduction"
"""Attributes of modules: see :func:`hold` and :func:`on_late_gradients`."""
_running: ContextVar[tuple[ref[Any], ...]] = ContextVar("modules that run", default=())
_apart: ContextVar[bool] = ContextVar("part that runs by itself", default=False)


def hold(module: Any, holder: Callable[[], AbstractContextManager[None]]) -> None:
    """Register a function that gathers a module's weights while its submodules run outside of its forward.

    Args:
        module: module that gathers its weights before its forward and reshards them after it.
        holder: function that returns a context in which the weights are gathered.
    """
    vars(module)[_HOLDER] = holder


def note_calls(module: Any) -> None:
    """Register hooks that make :func:`running` include the module during its forward."""
    tokens: list[Any] = []

    def enter(module: Any, *_: Any) -> None:
        tokens.append(_running.set((*_running.get(), ref(module))))

    def leave(*_: Any) -> None:
        if tokens:  # empty if an earlier hook raised before `enter` ran
            _running.reset(tokens.pop())

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def running() -> tuple[ref[Any], ...]:
    """Return weak references to the registered modules that are being called, outermost first."""
    return _running.get()


@contextlib.contextmanager
def there(modules: Sequence[ref[Any]]) -> Iterator[None]:
    """Gather the modules' weights inside the block, so that the block can recompute one part of a forward."""
    # With this flag FSDP2 does not prefetch the modules that would follow in a full forward.
    token = _apart.set(True)
    try:
        with contextlib.ExitStack() as stack:
            for module in modules:
                holder = vars(module()).get(_HOLDER)
                if holder is not None:
                    stack.enter_context(holder())
            yield
    finally:
        _apart.reset(token)


def runs_apart() -> bool:
    """Return whether only one part of a forward is being recomputed, inside :func:`there`."""
    return _apart.get()


# -- weight gradients that are computed after the backward of gathered weights --------------------------


def on_late_gradients(model: Any, reduce: Callable[[], None]) -> None:
    """Register the function that reduces weight gradients which are computed after a model's backward.

    Args:
        model: model chunk that is passed to the pipeline schedule.
        reduce: function that reduces the gradients, called when they are complete.
    """
    vars(model)[_REDUCTION] = reduce


def reduce_late_gradients(model: Any) -> None:
    """Call the function registered with :func:`on_late_gradients`; without one, hooks already reduced."""
    reduce = vars(model).get(_REDUCTION)
    if reduce is not None:
        reduce()
