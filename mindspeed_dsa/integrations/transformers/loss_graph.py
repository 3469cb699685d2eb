"""Routing of indexer losses' backward through module outputs, so that backward hooks of FSDP2 run.

FSDP2 registers backward hooks on a module's output, and gathers the weights for backward there. An indexer's
inputs are detached, and its loss is added to the model's loss directly. If the layer is frozen, its output
requires no gradient, the hooks do not run, and the loss's backward finds no weights.

To *connect* a loss to an output means to make its backward pass through that output with a zero gradient.
Each loss is connected to the outputs of its attention, its layer and the model, and each layer's output to
the layer below. Layers are thus gathered, reduced and resharded one by one. The next module computes on a
detached copy of a connected output, so that frozen weights do not enter the graph.

Losses of layers that reuse a selection reach its indexer through :class:`.Shared`. The values of a selection
are connected to the same outputs as the loss of the indexer's own layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from mindspeed_dsa.integrations.transformers.layers import ATTRIBUTE, Layer, Shared
from mindspeed_dsa.ops.graph import passes_no_gradient, with_backward_of


def connect(
    module: Any, output: Tensor, losses: list[Tensor], below: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Connect losses to a module's output, and this output to the module's input ``below``.

    If the model's loss is backpropagated through the output, FSDP2's hooks run anyway, and losses need no
    connection. Losses of FSDP2 modules are connected even then, so that FSDP2 also works if only the indexer
    losses are backpropagated.

    Args:
        module: module of the output.
        output: module's output.
        losses: losses of the indexers in the module.
        below: module's input, if only connected losses of lower layers are backpropagated through it.

    Returns:
        Connected output and connected losses.
    """
    if output.requires_grad and not passes_no_gradient(output):
        # Let the backward of this output continue into the layer below, too.
        if below is not None:
            output = with_backward_of(output, below)
        if not isinstance(module, FSDPModule):
            return output, losses
    elif losses or below is not None:
        if below is None:
            # A leaf that requires a gradient, to make the output part of a graph.
            below = torch.zeros((), device=output.device, requires_grad=True)
        output = with_backward_of(output.detach(), below)
    return output, [with_backward_of(loss, output) for loss in losses]


# -- hooks; each finds the layer's state at its module ------------------------------------------


def detach_input(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward pre-hook: detach the first input if only connected losses are backpropagated through it."""
    if args and isinstance(args[0], Tensor) and passes_no_gradient(args[0]):
        return args[0].detach(), *args[1:]
    return None


def enter_layer(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of decoder layers: detach the hidden states as :func:`detach_input` does.

    The original hidden states are stored for :func:`leave_layer`.
    """
    layer: Layer = getattr(module, ATTRIBUTE)
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    layer.below = hidden if passes_no_gradient(hidden) else None
    if layer.below is None:
        return None
    if args:
        return (hidden.detach(), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": hidden.detach()}


def leave_attention(module: Any, args: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward hook: connect the layer's indexer loss to the attention's output."""
    layer: Layer = getattr(module, ATTRIBUTE)
    if layer.loss is None:
        return output
    out, (layer.loss, *values) = connect(module, output[0], [layer.loss, *_values(layer.shared)])
    if layer.shared is not None:
        layer.shared.values = tuple(values)
    return out, *output[1:]


def leave_layer(module: Any, args: tuple[Any, ...], output: Any) -> Any:
    """Forward hook: connect indexer loss and layer input to the layer's output, and record the loss."""
    layer: Layer = getattr(module, ATTRIBUTE)
    losses = [] if layer.loss is None else [layer.loss, *_values(layer.shared)]
    out, *rest = output if isinstance(output, tuple) else (output,)
    out, losses = connect(module, out, losses, layer.below)
    if losses:
        layer.losses.found[module.self_attn.layer_idx], *values = losses
        if layer.shared is not None:
            layer.shared.values = tuple(values)
    layer.loss = layer.shared = layer.below = None
    return (out, *rest) if isinstance(output, tuple) else out


def _values(shared: Shared | None) -> tuple[Tensor, ...]:
    return () if shared is None else shared.values
