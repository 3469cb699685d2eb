"""Weights that are read without calling the layer that holds them, or on another stream than its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary, ref

_OVERLAPPED_GATHERING = "core.distributed.distributed_data_parallel"
"""Module of the hooks that wait for weights under ``--overlap-param-gather``."""


def wait_for_weights(layer: Any) -> None:
    """Run a layer's hooks before its forward.

    Under overlapped parameter gathering Megatron waits for a layer's weights in such a hook; without it
    they are those of the step before.
    """
    for number, hook in list(layer._forward_pre_hooks.items()):
        hook(layer, (), *([{}] if number in layer._forward_pre_hooks_with_kwargs else []))


def waits_for_weights(hook: Any) -> bool:
    """Return whether a hook before a forward is Megatron's wait for the layer's weights."""
    return getattr(hook, "__module__", "").endswith(_OVERLAPPED_GATHERING)


def wait_for_all_weights(module: Any) -> None:
    """Let the current stream wait for the weights of a module and of those inside of it.

    Megatron waits once for a bucket of weights, on the stream of the layer that is first to need it; those
    after it find nothing to wait for.
    """
    for layer in module.modules():
        for hook in list(layer._forward_pre_hooks.values()):
            if waits_for_weights(hook):
                hook(layer, ())


# -- weights that are gathered for a call of their module, and freed after it -------------------------

_holders: WeakKeyDictionary[Any, Callable[[], AbstractContextManager[None]]] = WeakKeyDictionary()
_running: ContextVar[tuple[ref[Any], ...]] = ContextVar("modules that run", default=())
_apart: ContextVar[bool] = ContextVar("part that runs by itself", default=False)


def hold(module: Any, holder: Callable[[], AbstractContextManager[None]]) -> None:
    """Say how the weights of a module are gathered for parts of it that run outside of its calls.

    Args:
        module: whose calls gather and free weights.
        holder: makes a context in which they are there; must not refer to the module.
    """
    _holders[module] = holder


def note_calls(module: Any) -> None:
    """Have :func:`running` know the module's calls."""
    tokens: list[Any] = []

    def enter(module: Any, *_: Any) -> None:
        tokens.append(_running.set((*_running.get(), ref(module))))

    def leave(*_: Any) -> None:
        if tokens:  # none if another hook has raised before
            _running.reset(tokens.pop())

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def running() -> tuple[ref[Any], ...]:
    """Return the modules that are being called and have holders, outermost first."""
    return _running.get()


@contextlib.contextmanager
def there(modules: Sequence[ref[Any]]) -> Iterator[None]:
    """Have the weights of modules, outermost first, for a part of a forward that runs again by itself."""
    token = _apart.set(True)
    try:
        with contextlib.ExitStack() as stack:
            for each in modules:
                holder = _holders.get(each())
                if holder is not None:
                    stack.enter_context(holder())
            yield
    finally:
        _apart.reset(token)


def runs_apart() -> bool:
    """Return whether what runs is such a part, which other modules do not follow as in a forward."""
    return _apart.get()


# -- gradients that come after the backward of weights that are gathered ------------------------------

_reductions: WeakKeyDictionary[Any, Callable[[], None]] = WeakKeyDictionary()


def on_late_gradients(model: Any, reduce: Callable[[], None]) -> None:
    """Say how gradients of a model's weights are reduced that come after its backward.

    Args:
        model: as a schedule gets it.
        reduce: is called when they are there; must not refer to the model.
    """
    _reductions[model] = reduce


def reduce_late_gradients(model: Any) -> None:
    """Reduce gradients that a model's weights have got since its backward; others' hooks have done so."""
    reduce = _reductions.get(model)
    if reduce is not None:
        reduce()
