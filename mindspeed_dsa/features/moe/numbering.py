"""Numbers of MoE layers in the whole model, and of the local experts on a rank.

Multi-token prediction (MTP) layers are numbered after the decoder's layers, although some Megatron releases
number their routers differently. An expert's number is its index in the router and in checkpoints. A slot is
a position among the local experts of all ranks; every expert parallel rank has the same number of slots.
Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mindspeed_dsa.feature import Context
from mindspeed_dsa.patches.spec import Patch

_BLOCK = "megatron.core.transformer.transformer_block:TransformerBlock.__init__"
_MTP_BLOCK = "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionBlock.__init__"


class Numbered(NamedTuple):
    """An MoE layer and its number.

    Attributes:
        number: layer number from 1, counted over all pipeline stages and then over the MTP layers.
        layer: Megatron's ``MoELayer``.
    """

    number: int
    layer: Any


Visit = Callable[[Any, Sequence[Numbered]], None]
"""Callback for a new chunk: takes Megatron's configuration and the chunk's MoE layers, possibly none."""


def rows(module: str, why: str, versions: str = "") -> tuple[Patch, ...]:
    """Return the patches that call a feature's functions when MoE layers are built.

    Args:
        module: import path of a module with ``in_block`` and ``in_mtp_block``, the
            results of :func:`decorators`.
        why: reason for the patches, one sentence.
        versions: range of Megatron-core versions.
    """
    return (
        Patch(_BLOCK, "wrap", f"{module}:in_block", why, ("config",), versions),
        Patch(_MTP_BLOCK, "wrap", f"{module}:in_mtp_block", why, ("config",), versions),
    )


_Decorator = Callable[[Callable[..., None], Context[Any]], Callable[..., None]]


def decorators(visit_of: Callable[[Context[Any]], Visit]) -> tuple[_Decorator, _Decorator]:
    """Return ``in_block`` and ``in_mtp_block`` of a feature, called with MoE layers on every stage.

    Args:
        visit_of: function that returns, for a context, a function to call with a block's MoE layers.
    """

    def decorator(is_mtp: bool) -> _Decorator:
        def decorate(original: Callable[..., None], context: Context[Any]) -> Callable[..., None]:
            visit = visit_of(context)

            def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
                original(self, config, *args, **kwargs)
                visit(config, _below(self.layers, context, config.num_layers if is_mtp else 0))

            return __init__

        return decorate

    return decorator(False), decorator(True)


def _below(layers: Sequence[Any], context: Context[Any], before: int) -> list[Numbered]:
    moe_layer = context.megatron("core.transformer.moe.moe_layer").BaseMoELayer
    return [
        Numbered(before + layer.layer_number, module)
        for layer in layers
        for module in layer.modules()
        if isinstance(module, moe_layer)
    ]


def order_of(router: Any) -> tuple[int, ...] | None:
    """Return the expert number for each slot of a router's layer, or ``None`` for the default placement."""
    order: tuple[int, ...] | None = vars(router).get("_order_of_experts")
    return order


def set_order(layer: Any, order: Sequence[int]) -> None:
    """Set the expert number for each slot of an MoE layer."""
    vars(layer.router)["_order_of_experts"] = tuple(order)
    vars(layer.experts)["_numbers_of_experts"] = tuple(order[slot] for slot in layer.local_expert_indices)


def is_placed(experts: Any) -> bool:
    """Return whether an experts module has a placement other than the default."""
    return "_numbers_of_experts" in vars(experts)


def tensors_by_position(experts: Any) -> list[list[Any]] | None:
    """Return the parameters of each local expert, or ``None`` if the module cannot list them.

    Megatron's ``SequentialMLP`` has one module per expert. Other modules can define ``tensors_of(position)``,
    which returns one expert's parameters, or views of stacked parameters. A module that defines it must also
    number the experts in its checkpoints with :func:`experts_of`.
    """
    if hasattr(experts, "tensors_of"):
        return [list(experts.tensors_of(position)) for position in range(experts.num_local_experts)]
    if hasattr(experts, "local_experts"):
        return [list(expert.parameters()) for expert in experts.local_experts]
    return None


def experts_of(experts: Any, ep_rank: int) -> tuple[int, ...]:
    """Return the expert numbers of the local experts, in the order of their slots.

    Checkpoints store experts under these numbers, so that they do not depend on the placement.

    Args:
        experts: a layer's ``experts`` module, with ``num_local_experts``.
        ep_rank: this rank's index in its expert parallel group.
    """
    numbers: tuple[int, ...] | None = vars(experts).get("_numbers_of_experts")
    if numbers is not None:
        return numbers
    # 4 local experts on rank 2: 8, 9, 10, 11.
    first = ep_rank * experts.num_local_experts
    return tuple(range(first, first + experts.num_local_experts))
