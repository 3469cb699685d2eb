"""Checks that torch's private FSDP2 classes are as this feature expects.

If torch renamed a method, our override would silently stop working. For example, in the paired schedule
(``pairs.py``), FSDP2 would end a backward after its first graph. If torch stopped reading an attribute that
we set, gradient sums would be rounded to the weights' dtype. So names and signatures are compared when a
model is wrapped, and gradients are checked once, after the first backward.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.parallel.local_shards import local_of
from mindspeed_dsa.patches.errors import SettingsError

_ADVICE = "use a torch release that docs/design/compatibility.md lists as tried, or drop --use-torch-fsdp2"


def require_overrides(subclass: type) -> None:
    """Check that every method of a subclass overrides a method of its base with the same parameters.

    Raises:
        SettingsError: the base lacks a method, or its parameters differ.
    """
    # Class methods are not FunctionType in `vars`: they belong to the subclass only.
    (base,) = subclass.__bases__
    for name, ours in vars(subclass).items():
        if isinstance(ours, FunctionType):
            theirs = getattr(base, name, None)
            if theirs is None:
                raise _changed(base, f"has no method {name}")
            if _parameters(theirs) != _parameters(ours):
                raise _changed(base, f"has a method {name}{inspect.signature(theirs)}")


def _parameters(function: Any) -> list[tuple[str, Any]]:
    return [(param.name, param.kind) for param in inspect.signature(function).parameters.values()]


def require_names(owner: Any, names: Iterable[str]) -> None:
    """Check that ``owner``, an object or class of torch, has the attributes that this feature sets.

    Raises:
        SettingsError: an attribute neither exists on the object nor is declared by its class.
    """
    kind = owner if isinstance(owner, type) else type(owner)
    declared = {name for base in kind.__mro__ for name in vars(base).get("__annotations__", ())}
    for name in names:
        if not hasattr(owner, name) and name not in declared:
            raise _changed(kind, f"has no attribute {name}")


def _changed(owner: type, what: str) -> SettingsError:
    return SettingsError(
        f"fsdp2: torch {torch.__version__} is not one that this library knows: its {owner.__name__} {what}, "
        f"and gradients would be wrong without a word; {_ADVICE}"
    )


def require_reduced(
    groups: Iterable[Any], parameters: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> None:
    """Check that the gradients after a backward are reduced and have the dtype of sums.

    Args:
        groups: ``FSDPParamGroup`` objects of a model.
        parameters: pairs of name and parameter of the model.
        dtype: expected dtype of gradient sums.

    Raises:
        SettingsError: a gradient has another dtype, or was not reduced.
    """
    after = f"fsdp2: after a backward with torch {torch.__version__}"
    for group in groups:
        for param in group.fsdp_params:
            if param.unsharded_accumulated_grad is not None or (
                hasattr(param, "_unsharded_param") and param._unsharded_param.grad is not None
            ):
                raise SettingsError(f"{after} a gradient has not been summed over ranks; {_ADVICE}")
    for name, parameter in parameters:
        kind = dtype if parameter.grad is None else local_of(parameter.grad).dtype
        if kind != dtype:
            raise SettingsError(f"{after} the gradient of {name} is {kind}, and sums are {dtype}; {_ADVICE}")
