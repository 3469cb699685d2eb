"""Connection of indexer losses to module outputs that require no gradient, such as frozen layers' outputs.

An indexer's inputs are detached, and its loss reaches the model's loss without passing through the layers
above. If the layer's output requires no gradient either, the loss's backward does not pass through that
output. Module wrappers attach their backward hooks to the output: FSDP2 gathers weights there, so the loss's
backward would find none.

The backward of each loss is therefore routed through the outputs of its attention, its layer and its model
with a zero gradient, and from each layer to the layer below. Layers are thus gathered, reduced and resharded
one by one. A module that receives a connected output computes on a detached copy, so that no frozen weight is
in the graph.
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
    """Connect losses to an output, and the output to the output of the layer below.

    If the output has a gradient of its own, losses that are summed with the model's loss need no connection.
    FSDP2 modules are connected anyway, because FSDP2 would reduce nothing if only the losses were
    backpropagated.

    Args:
        module: module of the output.
        output: module's output.
        losses: losses of the indexers in the module.
        below: module's input, if losses are connected to it and it has no gradient of its own.

    Returns:
        Output and losses.
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
    """Detach the first input if it has no gradient of its own. Forward pre-hook."""
    if args and isinstance(args[0], Tensor) and passes_no_gradient(args[0]):
        return args[0].detach(), *args[1:]
    return None


def enter_layer(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Detach a decoder layer's input in the same way, and keep the original for :func:`leave_layer`."""
    layer: Layer = getattr(module, ATTRIBUTE)
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    layer.below = hidden if passes_no_gradient(hidden) else None
    if layer.below is None:
        return None
    if args:
        return (hidden.detach(), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": hidden.detach()}


def leave_attention(module: Any, args: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[Any, ...]:
    """Connect the loss to the attention's output. Forward hook."""
    layer: Layer = getattr(module, ATTRIBUTE)
    if layer.loss is None:
        return output
    out, (layer.loss,) = connect(module, output[0], [layer.loss])
    return out, *output[1:]


def leave_layer(module: Any, args: tuple[Any, ...], output: Any) -> Any:
    """Connect the loss and the layer below to the layer's output, and record the loss. Forward hook."""
    layer: Layer = getattr(module, ATTRIBUTE)
    losses = [] if layer.loss is None else [layer.loss]
    out, *rest = output if isinstance(output, tuple) else (output,)
    out, losses = connect(module, out, losses, layer.below)
    if losses:
        layer.losses.found[module.self_attn.layer_idx] = losses[0]
    layer.loss = layer.below = None
    return (out, *rest) if isinstance(output, tuple) else out
