"""Which implementation of an operator runs: chosen once per shape class, and never silently.

A backend is a module ``mindspeed_dsa.ops.<operator>.<name>``. It declares what it cannot take in
``unsupported(shape) -> str | None``, a sentence that names the limit. An explicit request that
cannot be met is an error with that sentence; ``auto`` falls back and logs the sentence once.
Limits that no shape shows, such as which rows see which keys, it declares in ``plan_call``, which gets what
they depend on: see :func:`plan`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mindspeed_dsa import say

logger = logging.getLogger(__name__)

BackendName = Literal["auto", "reference", "chunked", "cpu", "triton", "npu"]

# What `auto` tries on each type of device, best first. The second takes every shape; `chunked` does so in
# bounded memory, where the reference would gather more than a GPU holds.
_PREFERENCE: dict[str, tuple[str, str]] = {
    "cpu": ("cpu", "reference"),
    "cuda": ("triton", "chunked"),
    "npu": ("npu", "reference"),
}


class BackendUnavailable(RuntimeError):
    """The backend asked for cannot run this operator here; the message says why and what can."""


@dataclass(frozen=True)
class ShapeClass:
    """What a backend's limits depend on: everything about a call but its batch and sequence lengths."""

    device: str
    dtype: torch.dtype
    sizes: tuple[tuple[str, int], ...]
    """Named sizes, such as ``("heads", 16)``."""

    def __getitem__(self, name: str) -> int:
        return dict(self.sizes)[name]

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes)
        return f"{str(self.dtype).removeprefix('torch.')} on {self.device}, {sizes}"


@cache
def choose(operator: str, requested: str, shape: ShapeClass) -> ModuleType:
    """The backend module for calls of this shape class.

    Args:
        operator: folder name under ``mindspeed_dsa/ops``.
        requested: one of :data:`BackendName`.
        shape: device, dtype and sizes of the call.

    Raises:
        ValueError: ``requested`` is no backend's name.
        BackendUnavailable: an explicitly requested backend cannot take the call.
    """
    check_name(operator, requested)
    if requested != "auto":
        module, reason = _load(operator, requested, shape)
        if module is None:
            raise BackendUnavailable(
                f"{operator}: backend {requested!r} cannot run {shape}: {reason}. "
                "Ask for 'auto' to take the best backend that can, or for the slow and exact 'reference'"
            )
        say.say_once(f"{operator} runs on the {requested} backend")
        return module

    for name in _PREFERENCE.get(shape.device, ("reference",)):
        module, reason = _load(operator, name, shape)
        if module is not None:
            say.say_once(f"{operator} runs on the {name} backend")
            return module
        logger.warning("%s: backend %r is passed over for %s: %s", operator, name, shape, reason)
    raise BackendUnavailable(f"{operator}: no backend can run {shape}")


def unless_empty(operator: str, implementation: ModuleType, *tensors: Tensor) -> ModuleType:
    """What runs a call: the reference if one of ``tensors`` has no entries, as in an empty pack.

    There is nothing to compute then, and no block, tile or grid to cut; plain PyTorch gives empty results,
    zeros, and zero gradients.

    Args:
        operator: folder name under ``mindspeed_dsa/ops``.
        implementation: what :func:`choose` returned.
        tensors: whose axes are the batch, the rows and the keys of the call.
    """
    return implementation if all(tensor.numel() for tensor in tensors) else _reference(operator)


def plan(
    operator: str, requested: str, implementation: ModuleType, *facts: Any
) -> tuple[ModuleType, tuple[Any, ...]]:
    """What runs a call, and what the backend found out about it, if it looks at calls at all.

    Args:
        operator: folder name under ``mindspeed_dsa/ops``.
        requested: one of :data:`BackendName`.
        implementation: what :func:`choose` returned. Its ``plan_call(*facts)``, if it has one, returns a
            sentence that says why it cannot take the call, or what its other functions want as their last
            argument.
        facts: what this depends on.

    Returns:
        The implementation, or what `auto` tries after it if it declines and any backend will do; and that
        last argument, if there is one.

    Raises:
        BackendUnavailable: it declines and was asked for by name.
    """
    if not hasattr(implementation, "plan_call"):
        return implementation, ()
    found = implementation.plan_call(*facts)
    if isinstance(found, str):
        return settle(operator, requested, implementation, found), ()
    return implementation, (found,)


def settle(operator: str, requested: str, implementation: ModuleType, reason: str | None) -> ModuleType:
    """What runs a call that the chosen backend may decline for a reason that no shape class shows.

    Args:
        operator: folder name under ``mindspeed_dsa/ops``.
        requested: one of :data:`BackendName`.
        implementation: what :func:`choose` returned.
        reason: why it cannot take this call, or None.

    Returns:
        The implementation, or what `auto` tries after it if it declines and any backend will do.

    Raises:
        BackendUnavailable: it declines and was asked for by name.
    """
    if reason is None:
        return implementation
    name = implementation.__name__.rpartition(".")[2]
    if requested != "auto":
        raise BackendUnavailable(
            f"{operator}: backend {name!r} cannot run this call: {reason}. "
            "Ask for 'auto' to fall back, or for the slow and exact 'reference'"
        )
    fallback = dict(_PREFERENCE.values()).get(name, "reference")
    say_once(f"{operator}: backend {name!r} is passed over for {fallback!r}: {reason}")
    return import_module(f"{__package__}.{operator}.{fallback}")


@cache
def say_once(message: str) -> None:
    """Log a warning the first time that it comes up."""
    logger.warning("%s", message)


def check_name(operator: str, requested: str) -> None:
    """Raise ``ValueError`` unless ``requested`` is one of :data:`BackendName`."""
    if requested not in get_args(BackendName):
        names = ", ".join(get_args(BackendName))
        raise ValueError(f"{operator}: no backend is called {requested!r}; choose one of {names}")


def _reference(operator: str) -> ModuleType:
    return import_module(f"{__package__}.{operator}.reference")


def _load(operator: str, name: str, shape: ShapeClass) -> tuple[ModuleType | None, str | None]:
    """The backend's module, or None and the reason."""
    path = f"{__package__}.{operator}.{name}"
    try:
        module = import_module(path)
    except ModuleNotFoundError as error:
        if error.name == path:
            return None, f"{operator} has no {name} implementation"
        return None, f"the package {error.name!r} is not installed"
    reason = module.unsupported(shape)
    return (module, None) if reason is None else (None, reason)
