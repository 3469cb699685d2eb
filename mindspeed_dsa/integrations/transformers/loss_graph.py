"""Indexer losses in the graph of modules whose outputs require no gradient, such as frozen layers.

An indexer's inputs are detached, and its loss reaches the model's loss without passing the layers above.
Where the layer's output requires no gradient either, the loss's backward does not pass that output, on which
wrappers of modules hook their part of backward. FSDP2 gathers weights there, and the loss finds none.

So the backward of each loss passes the outputs of its attention, its layer and its model, with a gradient of
zeros, and goes on from each layer to the one below: layers are gathered, reduced and freed one by one. A
module that is given such an output computes with a detached one, so that no frozen weight is in the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from mindspeed_dsa.integrations.transformers.layers import ATTRIBUTE, Layer
from mindspeed_dsa.ops.graph import passes_no_gradient, with_backward_of


def connect(
    module: Any, output: Tensor, losses: list[Tensor], below: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Connect losses to an output, and the output to that of the layer below.

    Where the output has a gradient of its own, losses that are summed with the model's loss need no
    connection. FSDP2 reduces nothing if the losses alone go backward: its modules always connect them.

    Args:
        module: owner of the output.
        output: of the module.
        losses: of the indexers in the module.
        below: input of the module, if losses are connected to it and it has no gradient of its own.

    Returns:
        The output and the losses.
    """
    if output.requires_grad and not passes_no_gradient(output):
        if below is not None:
            output = with_backward_of(output, below)
        if not isinstance(module, FSDPModule):
            return output, losses
    elif losses or below is not None:
        if below is None:
            below = torch.zeros((), device=output.device, requires_grad=True)
        output = with_backward_of(output.detach(), below)
    return output, [with_backward_of(loss, output) for loss in losses]


# -- hooks, each of which finds the layer's state at its module ---------------------------------


def detach_input(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Detach the first input if it has no gradient of its own: a hook before ``forward``."""
    if args and isinstance(args[0], Tensor) and passes_no_gradient(args[0]):
        return args[0].detach(), *args[1:]
    return None


def enter_layer(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Detach a decoder layer's input likewise, and keep the input for :func:`leave_layer`."""
    layer: Layer = getattr(module, ATTRIBUTE)
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    layer.below = hidden if passes_no_gradient(hidden) else None
    if layer.below is None:
        return None
    if args:
        return (hidden.detach(), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": hidden.detach()}


def leave_attention(module: Any, args: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[Any, ...]:
    """Connect the loss to the attention's output: a hook after ``forward``, as the next one is."""
    layer: Layer = getattr(module, ATTRIBUTE)
    if layer.loss is None:
        return output
    out, (layer.loss,) = connect(module, output[0], [layer.loss])
    return out, *output[1:]


def leave_layer(module: Any, args: tuple[Any, ...], output: Any) -> Any:
    """Connect the loss and the layer below to the layer's output, and record the loss."""
    layer: Layer = getattr(module, ATTRIBUTE)
    losses = [] if layer.loss is None else [layer.loss]
    out, *rest = output if isinstance(output, tuple) else (output,)
    out, losses = connect(module, out, losses, layer.below)
    if losses:
        layer.losses.found[module.self_attn.layer_idx] = losses[0]
    layer.loss = layer.below = None
    return (out, *rest) if isinstance(output, tuple) else out
