"""Backend selection: picks one backend per operator and shape class, and logs every choice.

A backend is a module ``mindspeed_dsa.ops.<operator>.<name>``, or for small operators a class of
``mindspeed_dsa.ops.<operator>.backends`` with that name. It declares its limits in
``unsupported(shape) -> str | None``, a sentence that names the limit. An explicit request that cannot be met
is an error with that sentence; ``auto`` falls back and logs the sentence once. Limits that depend on more
than the shape, such as which keys each query sees, are checked by the backend's plan function, which gets the
call's arguments: see :func:`plan`. The operator's ``protocol.py`` declares the other functions of its
backends, and mypy checks the modules against it. Each function takes the operator's arguments as one
:class:`Call`.

A backend with several algorithms for one function, such as the CPU backends, selects one per call with
:func:`algorithm`.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal, Protocol, TypeVar, get_args

import torch
from torch import Tensor

from mindspeed_dsa import log

_log = log.get("ops")

BackendName = Literal["auto", "reference", "chunked", "cpu", "cuda", "triton", "npu"]

# Backends that `auto` tries on each type of device, best first, if the operator has them. The second takes
# every shape: `chunked` in bounded memory, where the reference would gather more than a device holds.
# Operators without `chunked` fall back to the reference.
PREFERENCE: dict[str, tuple[str, str]] = {
    "cpu": ("cpu", "reference"),
    "cuda": ("triton", "chunked"),
    "npu": ("npu", "chunked"),
}
_BOUNDED = "chunked"
# PyTorch's own kernels, for operators without other kernels for this device.
_OF_TORCH = {"cuda": "cuda"}


class BackendUnavailable(RuntimeError):
    """The requested backend cannot run this operator here; the message gives the reason and alternatives."""


@dataclass(frozen=True)
class ShapeClass:
    """Selection key of a backend: a call's device, dtype and named sizes, without batch and lengths."""

    device: str
    dtype: torch.dtype
    sizes: tuple[tuple[str, int], ...]
    """Named sizes, such as ``("heads", 16)``."""
    index: int | None = None
    """Device index, because GPUs of a machine may differ; None is the current device."""

    @classmethod
    def of(cls, tensor: Tensor, *sizes: tuple[str, int]) -> ShapeClass:
        """Return the shape class of a call whose main argument is ``tensor``."""
        return cls(tensor.device.type, tensor.dtype, sizes, tensor.device.index)

    @property
    def place(self) -> torch.device:
        """Return the shape class's device as a ``torch.device``."""
        return torch.device(self.device) if self.index is None else torch.device(self.device, self.index)

    def __getitem__(self, name: str) -> int:
        return dict(self.sizes)[name]

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes)
        return f"{str(self.dtype).removeprefix('torch.')} on {self.device}, {sizes}"


@dataclass(frozen=True)
class Call:
    """Base class for an operator's arguments, which its backends take as one object."""

    def keep(self, ctx: Any, *results: Tensor | None) -> None:
        """Save the call's tensors and the forward's results for backward.

        Autograd saves them, so that saved-tensor hooks (offloading, checkpointing) see them.
        """
        tensors = {name: value for name, value in self._values() if isinstance(value, Tensor)}
        others = {name: value for name, value in self._values() if name not in tensors}
        ctx.kept_call = type(self), [*tensors], others
        ctx.save_for_backward(*tensors.values(), *results)

    @staticmethod
    def kept(ctx: Any) -> tuple[Any, ...]:
        """Return the call that :meth:`keep` saved, followed by the results."""
        kind, names, others = ctx.kept_call
        # The call's tensors come first, then the results.
        saved = ctx.saved_tensors
        return kind(**dict(zip(names, saved, strict=False)), **others), *saved[len(names) :]

    def _values(self) -> Iterator[tuple[str, Any]]:
        return ((field.name, getattr(self, field.name)) for field in fields(self))


class Backend(Protocol):
    """Base protocol of every operator's backends; the default declares no limits."""

    def unsupported(self, shape: ShapeClass, /) -> str | None:
        """Return why the backend cannot take calls of this shape, or None."""
        return None


@dataclass(frozen=True)
class Algorithm:
    """One of several ways in which a backend computes the same function.

    Attributes:
        name: description for the log.
        run: function that computes the result.
        declines: function that returns why the algorithm does not take a call, or None. Its sentence contains
            no figure that changes from call to call, so that it is logged once.
    """

    name: str
    run: Callable[..., Any]
    declines: Callable[..., str | None]


_Backend = TypeVar("_Backend", bound=Backend)
_calls: Counter[tuple[str, str]] = Counter()
_seconds: defaultdict[str, float] = defaultdict(float)


def takes_every_call(*facts: Any) -> None:
    """Return None, to accept any call: plan function, or ``unsupported``, of backends without limits."""


@cache
def choose(operator: str, requested: str, shape: ShapeClass) -> Any:
    """Return the backend for calls of this shape class.

    The result has the protocol type that the operator's ``protocol.py`` declares.

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

    for name, module, reason in candidates(operator, requested, shape):
        if module is not None:
            _report(operator, name)
            return module
        _log.warning("%s: backend %r is skipped for %s: %s", operator, name, shape, reason, ranks="all")
    raise BackendUnavailable(f"{operator}: no backend can run {shape}")


def candidates(operator: str, requested: str, shape: ShapeClass) -> Iterator[tuple[str, Any, str | None]]:
    """Yield the candidate backends for calls of a shape class, in order of preference.

    Args:
        operator: folder name under ``mindspeed_dsa/ops``.
        requested: one of :data:`BackendName`.
        shape: device, dtype and sizes of the call.

    Yields:
        ``(name, backend, None)``, or ``(name, None, reason)`` if that backend cannot run these calls.
    """
    if requested != "auto":
        tried: tuple[str, ...] = (requested,)
    elif _exists(operator, _OF_TORCH.get(shape.device, "")):
        tried = (_OF_TORCH[shape.device], "reference")
    else:
        tried = (*PREFERENCE.get(shape.device, ()), "reference")
    for name in dict.fromkeys(tried):
        if name != _BOUNDED or requested == name or _exists(operator, name):
            yield name, *_load(operator, name, shape)


def unless_empty(operator: str, implementation: _Backend, *tensors: Tensor) -> _Backend:
    """Return ``implementation``, or the reference if one of ``tensors`` has no elements.

    Other backends need at least one element to form blocks and launch grids. The reference, plain PyTorch,
    returns empty or zero results and zero gradients.

    Args:
        operator: folder name under ``mindspeed_dsa/ops``.
        implementation: backend that :func:`choose` returned.
        tensors: tensors that together have the call's batch, query and key axes.
    """
    if all(tensor.numel() for tensor in tensors):
        return implementation
    reference: _Backend = _find(operator, "reference")
    return reference


def plan(operator: str, requested: str, implementation: _Backend, planned: Any) -> tuple[_Backend, Any]:
    """Return the backend that runs a call, and its plan for the call.

    Args:
        operator: folder name under ``mindspeed_dsa/ops``.
        requested: one of :data:`BackendName`.
        implementation: backend that :func:`choose` returned.
        planned: result of the backend's plan function for this call. A string says why the backend declines
            the call; any other value, or None, is passed to the backend's functions as the call's ``plan``.

    Returns:
        The backend and its plan. If the backend declines and ``requested`` is ``auto``: the next backend that
        `auto` tries, and None.

    Raises:
        BackendUnavailable: the backend declines and was requested by name.
    """
    if not isinstance(planned, str):
        return implementation, planned
    name = _name(implementation)
    if requested != "auto":
        raise BackendUnavailable(
            f"{operator}: backend {name!r} cannot run this call: {planned}. "
            "Ask for 'auto' to fall back, or for the slow and exact 'reference' "
            "(in training with --dsa-backend)"
        )
    # The second choice of the device type whose first choice is this backend.
    fallback = dict(PREFERENCE.values()).get(name, "reference")
    if not _exists(operator, fallback):
        fallback = "reference"
    warn_once(f"{operator}: backend {name!r} is skipped for {fallback!r}: {planned}")
    return _find(operator, fallback), None


def algorithm(operator: str, algorithms: Sequence[Algorithm], *facts: Any) -> Algorithm:
    """Return the first algorithm that takes a call, and log each distinct choice once with its reasons.

    Args:
        operator: operator's name in the log.
        algorithms: candidates in order of preference; the last one takes every call.
        facts: arguments for the ``declines`` functions.
    """
    reasons = []
    for one in algorithms[:-1]:
        reason = one.declines(*facts)
        if reason is None:
            break
        reasons.append(f"not {one.name}: {reason}")
    # No break: every other algorithm declined, and the last one takes every call.
    else:
        one = algorithms[-1]
    because = f" ({'; '.join(reasons)})" if reasons else ""
    _log.info("%s is computed %s%s", operator, one.name, because, once=True)
    return one


def count_call(operator: str, implementation: Backend) -> None:
    """Count a forward call of an operator under the backend that runs it."""
    _calls[operator, _name(implementation)] += 1


def calls() -> Counter[tuple[str, str]]:
    """Return how often each operator was called in this process, by ``(operator, backend)``."""
    return _calls.copy()


@contextmanager
def spent(operator: str, place: torch.device) -> Iterator[None]:
    """If ``place`` is a CPU, add the wall time of the block to the operator's total, see :func:`seconds`.

    Accelerators work asynchronously, so their time is not measured. Callers measure forward and backward, but
    only the forward of backends that autograd differentiates.
    """
    start = time.perf_counter()
    try:
        yield
    finally:
        if place.type == "cpu":
            _seconds[operator] += time.perf_counter() - start


def seconds() -> dict[str, float]:
    """Return the seconds that each operator has run on CPUs in this process: see :func:`spent`."""
    return dict(_seconds)


def warn_once(message: str) -> None:
    """Log a warning the first time that this message occurs."""
    _log.warning("%s", message, once=True, ranks="all")


def check_name(operator: str, requested: str) -> None:
    """Raise ``ValueError`` unless ``requested`` is one of :data:`BackendName`."""
    if requested not in get_args(BackendName):
        names = ", ".join(get_args(BackendName))
        raise ValueError(f"{operator}: no backend is called {requested!r}; choose one of {names}")


def _report(operator: str, name: str) -> None:
    _log.info("%s runs on the %s backend", operator, name, once=True)


def _name(implementation: Backend) -> str:
    if isinstance(implementation, ModuleType):
        return implementation.__name__.rpartition(".")[2]
    return type(implementation).__name__.lower()


def _find(operator: str, name: str) -> Any:
    """Import a backend; return its module, or an instance of its class."""
    kind = _class(operator, name)
    return import_module(f"{__package__}.{operator}.{name}") if kind is None else kind()


def _class(operator: str, name: str) -> Any:
    path = f"{__package__}.{operator}.backends"
    return None if find_spec(path) is None else getattr(import_module(path), name.capitalize(), None)


def _exists(operator: str, name: str) -> bool:
    if not name:
        return False
    module = f"{__package__}.{operator}.{name}"
    return _class(operator, name) is not None or find_spec(module) is not None


def _is_foreign(error: Exception) -> bool:
    """Return whether an import error was raised by a third-party package rather than by this one."""
    if isinstance(error, ImportError) and error.name:
        name = error.name  # the module that was not found
    elif isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        name = error.obj.__name__  # the module that lacks the attribute
    else:
        frames = list(traceback.walk_tb(error.__traceback__))
        name = frames[-1][0].f_globals.get("__name__", "")
    return name.partition(".")[0] != __name__.partition(".")[0]


def _load(operator: str, name: str, shape: ShapeClass) -> tuple[Any, str | None]:
    """Import a backend; return ``(backend, None)``, or ``(None, reason)`` if it cannot be used."""
    path = f"{__package__}.{operator}.{name}"
    try:
        module = _find(operator, name)
    except ModuleNotFoundError as error:
        if error.name == path:
            return None, f"{operator} has no {name} implementation"
        return None, f"the package {error.name!r} is not installed"
    except Exception as error:
        # Tolerate other packages' import errors: an incompatible release, or a library that does not load
        # here. Raise our own, which must not look like a missing package.
        if not _is_foreign(error):
            raise
        return None, f"its module cannot be imported: {type(error).__name__}: {error}"
    reason = module.unsupported(shape)
    return (module, None) if reason is None else (None, reason)
