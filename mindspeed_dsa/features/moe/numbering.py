"""MoE layers by their number in the whole model, and which of its experts a rank holds.

Layers of multi-token prediction count on after the decoder's, whatever number Megatron's release gives
their routers. An expert's number is the one that the router and checkpoints know it by; it is held in a slot,
of which each expert parallel rank has the same number. Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mindspeed_dsa.feature import Context
from mindspeed_dsa.patches.spec import Patch

_BLOCK = "megatron.core.transformer.transformer_block:TransformerBlock.__init__"
_MTP_BLOCK = "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionBlock.__init__"


class Numbered(NamedTuple):
    """An MoE layer.

    Attributes:
        number: from 1, through all pipeline stages, and on through the layers of multi-token prediction.
        layer: Megatron's ``MoELayer``.
    """

    number: int
    layer: Any


Visit = Callable[[Any, Sequence[Numbered]], None]
"""Gets Megatron's configuration and the MoE layers that were built: none on a stage of dense layers."""


def rows(module: str, why: str, versions: str = "") -> tuple[Patch, ...]:
    """Return the patches that find MoE layers when they are built.

    Args:
        module: has ``in_block`` and ``in_mtp_block``, made of the functions below.
        why: one sentence for the patches.
        versions: of Megatron-core.
    """
    return (
        Patch(_BLOCK, "wrap", f"{module}:in_block", why, ("config",), versions),
        Patch(_MTP_BLOCK, "wrap", f"{module}:in_mtp_block", why, ("config",), versions),
    )


def after_block(original: Callable[..., None], context: Context[Any], visit: Visit) -> Callable[..., None]:
    """Decorate ``TransformerBlock.__init__``: ``visit`` is called on every stage, for every chunk."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        visit(config, _below(self.layers, context, 0))

    return __init__


def after_mtp_block(
    original: Callable[..., None], context: Context[Any], visit: Visit
) -> Callable[..., None]:
    """Decorate ``MultiTokenPredictionBlock.__init__`` in the same way."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        visit(config, _below(self.layers, context, config.num_layers))

    return __init__


def _below(layers: Sequence[Any], context: Context[Any], before: int) -> list[Numbered]:
    moe_layer = context.megatron("core.transformer.moe.moe_layer").BaseMoELayer
    return [
        Numbered(before + layer.layer_number, module)
        for layer in layers
        for module in layer.modules()
        if isinstance(module, moe_layer)
    ]


def order_of(router: Any) -> tuple[int, ...] | None:
    """Return which expert each slot of a router's layer holds; ``None``: every expert is in its own slot."""
    order: tuple[int, ...] | None = vars(router).get("_order_of_experts")
    return order


def set_order(layer: Any, order: Sequence[int]) -> None:
    """Say which expert each slot of an MoE layer holds."""
    vars(layer.router)["_order_of_experts"] = tuple(order)
    vars(layer.experts)["_numbers_of_experts"] = tuple(order[slot] for slot in layer.local_expert_indices)


def is_placed(experts: Any) -> bool:
    """Return whether a module of experts holds other experts than those of its own slots."""
    return "_numbers_of_experts" in vars(experts)


def tensors_by_position(experts: Any) -> list[list[Any]] | None:
    """Return the parameters of each expert that a module of experts holds; ``None`` where it cannot say.

    Megatron's ``SequentialMLP`` has a module for each expert. Others say that their checkpoints go by
    :func:`experts_of` with a method ``tensors_of(position)``, which returns the parameters of one expert, or
    views into stacked ones.
    """
    if hasattr(experts, "tensors_of"):
        return [list(experts.tensors_of(position)) for position in range(experts.num_local_experts)]
    if hasattr(experts, "local_experts"):
        return [list(expert.parameters()) for expert in experts.local_experts]
    return None


def experts_of(experts: Any, ep_rank: int) -> tuple[int, ...]:
    """Return the numbers of the experts that a module of experts holds, in the order of its own slots.

    Modules that write checkpoints give every expert its number, so that these do not depend on where the
    expert was.

    Args:
        experts: a layer's ``experts``; has ``num_local_experts``.
        ep_rank: this rank in its expert parallel group.
    """
    numbers: tuple[int, ...] | None = vars(experts).get("_numbers_of_experts")
    if numbers is not None:
        return numbers
    first = ep_rank * experts.num_local_experts
    return tuple(range(first, first + experts.num_local_experts))
