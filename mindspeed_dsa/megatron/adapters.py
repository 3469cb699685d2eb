"""Low-rank adapters (LoRA) that PEFT packages wrap around Megatron's linear layers, recognised by structure.

Two structures are known, and neither package is imported:

* PEFT, and mcore-bridge's ``LoraParallelLinear``: ``base_layer``, and by the adapter's name ``lora_A``,
  ``lora_B``, ``lora_dropout`` and ``scaling``.
* Megatron-Bridge's ``LoRALinear``: ``to_wrap``, and ``adapter`` with ``linear_in``, ``linear_out``, ``alpha``
  and ``dim``.

A wrapped layer computes ``W x + scale * B (A x)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

_INNER = ("base_layer", "to_wrap")
_LOW_RANK = ("lora_A.", "lora_B.", "adapter.linear_in.", "adapter.linear_out.")


@dataclass(frozen=True)
class LowRank:
    """Product of two matrices that an adapter adds to a weight.

    Attributes:
        down: module with the matrix A, ``[rank, in]``. If tensor parallel ranks split it, a part of the rows.
        up: module with the matrix B, ``[out, rank]``; this rank's rows of the output.
        scale: factor of the product.
    """

    down: Any
    up: Any
    scale: float


def base_of(module: Any) -> Any:
    """Return the linear layer that adapters wrap, or ``module`` itself if none does."""
    while (inner := _wrapped(module)) is not None:
        module = inner
    return module


def adapters_of(module: Any) -> tuple[LowRank, ...]:
    """Return the active adapters of a linear layer; none if they are disabled or merged.

    Raises:
        ValueError: an active adapter computes more than ``W x + scale * B (A x)``. The message has cause and
            remedy.
    """
    found: list[LowRank] = []
    while (inner := _wrapped(module)) is not None:
        found += _of_peft(module) if "base_layer" in module._modules else _of_bridge(module)
        module = inner
    return tuple(found)


def matrices_of(module: Any) -> Iterator[tuple[Any, Any]]:
    """Return the modules with the matrices A and B of all adapters of a linear layer, active or not."""
    while (inner := _wrapped(module)) is not None:
        for name in module._modules.get("lora_A", ()):
            yield module.lora_A[name], module.lora_B[name]
        adapter = module._modules.get("adapter")
        if hasattr(adapter, "linear_in"):
            yield adapter.linear_in, adapter.linear_out
        module = inner


def _wrapped(module: Any) -> Any:
    return next((module._modules[name] for name in _INNER if name in module._modules), None)


def _of_peft(module: Any) -> Iterator[LowRank]:
    if getattr(module, "disable_adapters", False):
        if getattr(module, "merged", False):
            module.unmerge()  # as the layer's own forward does
        return
    if getattr(module, "merged", False):
        return
    _require_low_rank(module)
    for name in module.active_adapters:
        if name not in module.lora_A:
            continue
        if variant := getattr(module, "lora_variant", {}).get(name):
            raise ValueError(f"the adapter {name!r} is the variant {type(variant).__name__}; use plain LoRA")
        _require_linear(repr(name), module.lora_dropout[name], module.lora_A[name], module.lora_B[name])
        yield LowRank(module.lora_A[name], module.lora_B[name], module.scaling[name])


def _of_bridge(module: Any) -> Iterator[LowRank]:
    if not getattr(module, "_adapter_enabled", True):
        return
    _require_low_rank(module)
    adapter = module.adapter
    if not isinstance(adapter.activation, torch.nn.Identity):
        raise ValueError(f"its adapter has the activation {type(adapter.activation).__name__}; use LoRA")
    _require_linear("LoRA", adapter.dropout, adapter.linear_in, adapter.linear_out)
    yield LowRank(adapter.linear_in, adapter.linear_out, adapter.alpha / adapter.dim)


def _require_low_rank(module: Any) -> None:
    """Refuse a wrapper with parameters besides the wrapped layer's and the two matrices'."""
    inner = tuple(f"{name}." for name in _INNER)
    names = [name for name, _ in module.named_parameters() if not name.startswith(inner)]
    others = [name for name in names if not name.startswith(_LOW_RANK)]
    if any("magnitude" in name for name in others):
        raise ValueError("its adapter is DoRA, which scales the whole weight; set use_dora to False")
    if others or not names:
        raise ValueError(
            f"it is wrapped by {type(module).__name__} with {', '.join(others) or 'no low-rank matrices'}; "
            "use plain LoRA"
        )


def _require_linear(name: str, dropout: Any, *matrices: Any) -> None:
    """Refuse an adapter that drops inputs or outputs, or adds a bias."""
    rate = getattr(dropout, "p", 0.0)
    if rate > 0 and dropout.training:
        raise ValueError(
            f"the adapter {name} drops {rate:.0%} of its inputs, and a dropout is not part of a weight; "
            "set the adapter's dropout to 0"
        )
    for matrix in matrices:
        bias = getattr(matrix, "bias", None)
        if bias is not None and bias.numel():  # Transformer Engine's layers without bias have an empty one
            raise ValueError(f"the adapter {name} has a bias; set lora_bias to False")
