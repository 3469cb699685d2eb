"""Which implementation of an operator runs: chosen once per shape class, and never silently.

A backend is a module ``mindspeed_dsa.ops.<operator>.<name>``. It declares what it cannot take in
``unsupported(shape) -> str | None``, a sentence that names the limit. An explicit request that
cannot be met is an error with that sentence; ``auto`` falls back and logs the sentence once.
Limits that no shape shows, such as which rows see which keys, it declares in its plans, which get what
they depend on: see :func:`plan`. What else a backend has is its operator's ``protocol.py``, against which
mypy checks the modules.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, Protocol, TypeVar, get_args

import torch
from torch import Tensor

from mindspeed_dsa import log

_log = log.get("ops")

BackendName = Literal["auto", "reference", "chunked", "cpu", "cuda", "triton", "npu"]

# What `auto` tries on each type of device, best first, of what an operator has. The second takes every shape;
# `chunked` does so in bounded memory, where the reference would gather more than a device holds; operators
# without one have the reference.
_PREFERENCE: dict[str, tuple[str, str]] = {
    "cpu": ("cpu", "reference"),
    "cuda": ("triton", "chunked"),
    "npu": ("npu", "chunked"),
}
_BOUNDED = "chunked"
# PyTorch's own kernels, for operators that have no others for this device.
_OF_TORCH = {"cuda": "cuda"}


class BackendUnavailable(RuntimeError):
    """The backend asked for cannot run this operator here; the message says why and what can."""


@dataclass(frozen=True)
class ShapeClass:
    """What a backend's limits depend on: everything about a call but its batch and sequence lengths."""

    device: str
    dtype: torch.dtype
    sizes: tuple[tuple[str, int], ...]
    """Named sizes, such as ``("heads", 16)``."""
    index: int | None = None
    """Which device of that type: GPUs of a machine may differ. None is the current one."""

    @classmethod
    def of(cls, tensor: Tensor, *sizes: tuple[str, int]) -> ShapeClass:
        """That of a call whose main argument is ``tensor``."""
        return cls(tensor.device.type, tensor.dtype, sizes, tensor.device.index)

    @property
    def place(self) -> torch.device:
        """The device."""
        return torch.device(self.device) if self.index is None else torch.device(self.device, self.index)

    def __getitem__(self, name: str) -> int:
        return dict(self.sizes)[name]

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes)
        return f"{str(self.dtype).removeprefix('torch.')} on {self.device}, {sizes}"


class Backend(Protocol):
    """What the backends of every operator have."""

    __name__: str

    def unsupported(self, shape: ShapeClass, /) -> str | None:
        """Why it cannot take calls of this shape, or None."""


_Backend = TypeVar("_Backend", bound=Backend)
_calls: Counter[tuple[str, str]] = Counter()


def takes_every_call(*facts: Any) -> None:
    """The plan of a backend whose limits all show in the shape."""


@cache
def choose(operator: str, requested: str, shape: ShapeClass) -> Any:
    """The backend module for calls of this shape class, of a type in the operator's ``protocol.py``.

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
                "Ask for 'auto' to take the best backend that can, or for the slow and exact 'reference' "
                "(in training with --dsa-backend)"
            )
        _report(operator, requested)
        return module

    if _exists(operator, _OF_TORCH.get(shape.device, "")):
        tried: tuple[str, ...] = (_OF_TORCH[shape.device],)
    else:
        tried = _PREFERENCE.get(shape.device, ())
    for name in (*tried, "reference"):
        if name == _BOUNDED and not _exists(operator, name):
            continue
        module, reason = _load(operator, name, shape)
        if module is not None:
            _report(operator, name)
            return module
        _log.warning("%s: backend %r is skipped for %s: %s", operator, name, shape, reason, ranks="all")
    raise BackendUnavailable(f"{operator}: no backend can run {shape}")


def unless_empty(operator: str, implementation: _Backend, *tensors: Tensor) -> _Backend:
    """What runs a call: the reference if one of ``tensors`` has no entries, as in an empty pack.

    There is nothing to compute then, and no block, tile or grid to cut; plain PyTorch gives empty results,
    zeros, and zero gradients.

    Args:
        operator: folder name under ``mindspeed_dsa/ops``.
        implementation: what :func:`choose` returned.
        tensors: whose axes are the batch, the rows and the keys of the call.
    """
    if all(tensor.numel() for tensor in tensors):
        return implementation
    reference: _Backend = _module(operator, "reference")
    return reference


def plan(
    operator: str, requested: str, implementation: _Backend, found: Any
) -> tuple[_Backend, tuple[Any, ...]]:
    """What runs a call, and what its functions want to know about it.

    Args:
        operator: folder name under ``mindspeed_dsa/ops``.
        requested: one of :data:`BackendName`.
        implementation: what :func:`choose` returned.
        found: what its plan for this call returned: a sentence that says why it cannot take the call, what
            its other functions want as their last argument, or None if they want nothing.

    Returns:
        The implementation, or what `auto` tries after it if it declines and any backend will do; and that
        last argument, if there is one.

    Raises:
        BackendUnavailable: it declines and was asked for by name.
    """
    if found is None:
        return implementation, ()
    if not isinstance(found, str):
        return implementation, (found,)
    name = _name(implementation)
    if requested != "auto":
        raise BackendUnavailable(
            f"{operator}: backend {name!r} cannot run this call: {found}. "
            "Ask for 'auto' to fall back, or for the slow and exact 'reference' "
            "(in training with --dsa-backend)"
        )
    fallback = dict(_PREFERENCE.values()).get(name, "reference")
    if not _exists(operator, fallback):
        fallback = "reference"
    warn_once(f"{operator}: backend {name!r} is skipped for {fallback!r}: {found}")
    return _module(operator, fallback), ()


def count_call(operator: str, implementation: Backend) -> None:
    """Count a forward call of an operator, once what runs it is decided."""
    _calls[operator, _name(implementation)] += 1


def calls() -> Counter[tuple[str, str]]:
    """How often each operator was called in this process, and on which backend: by ``(operator, name)``."""
    return _calls.copy()


def warn_once(message: str) -> None:
    """Log a warning the first time that it comes up."""
    _log.warning("%s", message, once=True, ranks="all")


def check_name(operator: str, requested: str) -> None:
    """Raise ``ValueError`` unless ``requested`` is one of :data:`BackendName`."""
    if requested not in get_args(BackendName):
        names = ", ".join(get_args(BackendName))
        raise ValueError(f"{operator}: no backend is called {requested!r}; choose one of {names}")


def _report(operator: str, name: str) -> None:
    _log.info("%s runs on the %s backend", operator, name, once=True)


def _name(implementation: Backend) -> str:
    return implementation.__name__.rpartition(".")[2]


def _module(operator: str, name: str) -> Any:
    return import_module(f"{__package__}.{operator}.{name}")


def _exists(operator: str, name: str) -> bool:
    return bool(name) and find_spec(f"{__package__}.{operator}.{name}") is not None


def _load(operator: str, name: str, shape: ShapeClass) -> tuple[Any, str | None]:
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
