"""Transformer layers that run one half batch's attention while the other half's tokens are in an all-to-all.

The order of forward for the halves 0 and 1 is

    attention 0, start dispatch 0, attention 1, wait for dispatch 0, start dispatch 1, experts 0, wait for
    dispatch 1, start combine 0, experts 1, wait for combine 0, start combine 1

The next layer begins with the attention of half 0, before the wait for combine 1. In the last layer, the
shared expert hides combine 1. "Attention" here includes norm, router and permutation. Backward runs the nodes
in the reverse order, so the same work hides the same transfers. Only a chunk's last combine and first
dispatch have less work to hide them.

A half consists of whole sequences. If there is only one sequence, it is one half of the tokens: see
:mod:`.keys`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.moe.batch_overlap.choice import State
from mindspeed_dsa.features.moe.batch_overlap.feature import (
    Options,
    check_attention,
    check_choice,
    check_halves,
    check_rows,
)
from mindspeed_dsa.features.moe.batch_overlap.halves import Mode
from mindspeed_dsa.features.moe.batch_overlap.keys import Keys
from mindspeed_dsa.features.moe.batch_overlap.routing import Routing
from mindspeed_dsa.features.moe.batch_overlap.stages import Stages
from mindspeed_dsa.megatron.configuration import require
from mindspeed_dsa.megatron.dsa import uses_dsa


@dataclass
class _Cut:
    """Two halves of a microbatch, as passed from layer to layer.

    Attributes:
        first: hidden states of half 0, ``[sequence, batch, hidden]``.
        second: function that waits for half 1 and returns its hidden states.
        dim: dimension along which the microbatch is split: 0 (tokens of one sequence) or 1 (whole sequences).
    """

    first: Tensor
    second: Callable[[], Tensor]
    dim: int

    @classmethod
    def of(cls, hidden: Tensor) -> _Cut:
        """Split ``[sequence, batch, hidden]`` by sequence, or by token if there is only one sequence."""
        dim = 0 if hidden.size(1) == 1 else 1
        first, second = (half.contiguous() for half in hidden.tensor_split(2, dim))
        return cls(first, lambda: second, dim)

    def joined(self) -> Tensor:
        """Wait for half 1 and concatenate the halves."""
        return torch.cat((self.first, self.second()), self.dim)


_HANDED_ON = "_mindspeed_dsa_halves"


def run_in_block(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Wrap ``TransformerBlock.forward``: let consecutive layers pass halves without waiting for half 1."""
    if context.options.attention is False:
        return original
    state = context.state(State)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Full recompute saves the whole microbatch at each layer's input, so halves are joined there.
        recomputed = self.training and self.config.recompute_granularity == "full"
        before, state.block = state.block, None if recomputed else self
        try:
            return original(self, *args, **kwargs)
        finally:
            state.block = before

    return forward


def run_halves(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Wrap ``TransformerLayer.forward``: run attention, too, in halves."""
    if context.options.attention is False:
        return original
    state = context.state(State)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden: Any = args[0] if args else kwargs.get("hidden_states")
        cut: _Cut | None = getattr(hidden, _HANDED_ON, None)
        if cut is None and not _takes_part(self, hidden, args, kwargs, context):
            return original(self, *args, **kwargs)
        halves = _arguments(hidden, kwargs)

        def run(mode: Mode, cut: _Cut, hands_on: bool = False) -> _Cut:
            return _run(self, cut, hidden.size(cut.dim), halves, context, mode == "in turn", hands_on)

        if self not in state.modes:

            def measure(mode: Mode) -> None:
                if mode == "whole":
                    original(self, *args, **kwargs)
                else:
                    run(mode, _Cut.of(hidden)).joined()

            state.modes[self] = state.choose(self, self.mlp.token_dispatcher.ep_group, measure)
        if cut is None and state.modes[self] == "whole":
            return original(self, *args, **kwargs)
        hands_on = _hands_on(self, context)
        done = run(state.modes[self], _Cut.of(hidden) if cut is None else cut, hands_on)
        return (_stand_in(done, hidden) if hands_on else done.joined()), None

    return forward


def _takes_part(
    layer: Any, hidden: Tensor, args: Any, kwargs: Mapping[str, Any], context: Context[Options]
) -> bool:
    """Return whether this forward can run in halves; log the reason once if not."""
    state = context.state(State)
    if not layer.training or state.is_measured or state.modes.get(layer) == "whole":
        return False
    if not _is_served(layer, context):
        return False
    unknown = [
        name
        for name, value in kwargs.items()
        if value is not None and name not in ("hidden_states", "attention_mask", *_ANGLES)
    ]
    if len(args) > 1 or unknown:
        why = f"layers were given {', '.join(unknown) or 'arguments without names'}"
    elif layer.mlp._forward_hooks:
        why = "a forward hook is on a layer's mlp, which is taken apart"
    elif hidden.size(1) > 1:
        return True
    elif not _knows_rows(layer):
        why = "microbatches have one sequence, and Megatron's own attention knows no rows without all keys"
    else:
        problems = list(check_rows(layer.config, context.options, hidden.size(0)))
        if not problems:
            return True
        why = problems[0]
    context.log.warning("attention stays whole: %s", why, once=True)
    return False


def _knows_rows(layer: Any) -> bool:
    """Return whether attention supports fewer queries than keys. For DSA, :func:`check_rows` decides."""
    core = layer.self_attention.core_attention
    return uses_dsa(layer.config) or getattr(core, "dense_context_parallel_plan", None) is not None


def _is_served(layer: Any, context: Context[Options]) -> bool:
    modes = context.state(State).modes
    if layer in modes:
        return True
    dispatcher = getattr(layer.mlp, "token_dispatcher", None)
    ours = context.megatron("core.transformer.moe.token_dispatcher").MoEAlltoAllTokenDispatcher
    if not isinstance(dispatcher, ours) or dispatcher.ep_size == 1:
        return False
    if not hasattr(layer.self_attention, "core_attention"):  # a layer of experts alone, of a hybrid model
        return False
    problems = [*check_halves(layer.config, context.options), *check_attention(layer.config, context.options)]
    for problem in problems:
        context.log.warning("attention stays whole: %s", problem, once=True)
    if problems:
        return False
    require(context, check_choice, layer.config)
    if context.options.always:
        modes[layer] = "interleaved"
    return True


_ANGLES = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")
"""Arguments of a layer's forward that are the same for both halves, if these are whole sequences."""
_NONE = ("packed_seq_params", "sequence_len_offset")
"""Arguments that Megatron's functions read, ``None`` for both halves."""


def _arguments(hidden: Tensor, kwargs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the layer arguments for each half, except for the hidden states."""
    mask: Tensor | None = kwargs.get("attention_mask")
    masks: Any = (mask, mask)
    if hidden.size(1) == 1:
        masks = (None, None)  # rows of one sequence use the causal mask
    elif mask is not None and mask.size(0) == hidden.size(1):
        # A mask per sequence: each half takes its own sequences'.
        masks = mask.tensor_split(2)
    angles = {name: kwargs.get(name) for name in _ANGLES}
    return [{**angles, **dict.fromkeys(_NONE), "attention_mask": mask} for mask in masks]


def _hands_on(layer: Any, context: Context[Options]) -> bool:
    """Return whether the next layer accepts halves and gets this layer's output unchanged."""
    state = context.state(State)
    if state.block is None or layer._forward_hooks:
        return False
    layers = list(state.block.layers)
    position = next((index for index, each in enumerate(layers) if each is layer), len(layers))
    if position + 1 >= len(layers) or not _is_served(layers[position + 1], context):
        return False
    # A layer runs whole until it is measured.
    return state.modes.get(layers[position + 1], "whole") != "whole"


def _stand_in(cut: _Cut, hidden: Tensor) -> Tensor:
    """Return a tensor of NaNs with the halves attached, which the block passes to the next layer."""
    stand_in = hidden.new_full((), torch.nan).expand(hidden.shape)  # NaN exposes code that reads it
    setattr(stand_in, _HANDED_ON, cut)
    return stand_in


def _run(
    layer: Any,
    cut: _Cut,
    length: int,
    arguments: list[dict[str, Any]],
    context: Context[Options],
    waits: bool,
    hands_on: bool,
) -> _Cut:
    """Run a layer in halves. The combine of half 1 is still in flight on return."""
    routing = Routing(cut.dim)
    keys = Keys(layer) if cut.dim == 0 else None

    def stages(hidden: Tensor, number: int) -> Stages:
        # Fraction of the microbatch, the weight of the half's indexer loss.
        share = hidden.size(cut.dim) / length
        mine = arguments[number]
        return Stages(layer, number, hidden, mine, routing, keys, share, context, waits=waits)

    first = stages(cut.first, 0)
    first.attend()
    # Half 1 of the previous layer: waits for its combine, hidden by attention 0.
    hidden = cut.second()
    first.dispatch()
    second = stages(hidden, 1)
    # Hides dispatch 0.
    second.attend()
    first.arrive()
    second.dispatch()
    # Hides dispatch 1.
    first.compute()
    if hands_on:
        first.compute_shared()
    second.arrive()
    first.combine()
    # Hides combine 0.
    second.compute()
    if hands_on:
        second.compute_shared()
    first.land()
    second.combine()
    # Without a next layer, the shared expert hides combine 1.
    if not hands_on:
        first.compute_shared()
        second.compute_shared()

    def finish() -> Tensor:
        second.land()
        return second.finish()

    return _Cut(first.finish(), finish, cut.dim)
