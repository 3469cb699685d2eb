"""Checks of FSDP2's private classes, which the code here builds on: made before it trains.

A method that torch renames is overridden no more, and nobody says so: a backward of pairs would end with its
first graph. So is an attribute that is set and no longer read: sums would be rounded to the weights' type. So
names and parameters are compared when a model is converted, and gradients once, after their first backward.
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
    """Compare every method of a subclass with the one of its base that it takes the place of.

    Class methods are the subclass's own.

    Raises:
        SettingsError: the base has no such method, or one with other parameters.
    """
    (base,) = subclass.__bases__
    for name, ours in vars(subclass).items():
        if isinstance(ours, FunctionType):
            theirs = getattr(base, name, None)
            if theirs is None:
                raise _changed(base, f"has no method {name}")
            if _parameters(theirs) != _parameters(ours):
                raise _changed(base, f"has a method {name}{inspect.signature(theirs)}")


def _parameters(function: Any) -> list[tuple[str, Any]]:
    return [(each.name, each.kind) for each in inspect.signature(function).parameters.values()]


def require_names(owner: Any, names: Iterable[str]) -> None:
    """Find attributes that are set here and read by torch, which would take no notice of a wrong one.

    Raises:
        SettingsError: it has none of a name, nor does its class declare it.
    """
    kind = owner if isinstance(owner, type) else type(owner)
    declared = {name for each in kind.__mro__ for name in vars(each).get("__annotations__", ())}
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
    """Look at what a backward has left.

    Args:
        groups: ``FSDPParamGroup`` of a model.
        parameters: of the model, by name.
        dtype: of sums of gradients.

    Raises:
        SettingsError: a gradient is of another type, or has not been reduced.
    """
    found = f"fsdp2: after a backward with torch {torch.__version__}"
    for group in groups:
        for each in group.fsdp_params:
            if each.unsharded_accumulated_grad is not None or (
                hasattr(each, "_unsharded_param") and each._unsharded_param.grad is not None
            ):
                raise SettingsError(f"{found} a gradient has not been summed over ranks; {_ADVICE}")
    for name, parameter in parameters:
        kind = dtype if parameter.grad is None else local_of(parameter.grad).dtype
        if kind != dtype:
            raise SettingsError(f"{found} the gradient of {name} is {kind}, and sums are {dtype}; {_ADVICE}")
