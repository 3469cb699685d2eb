"""Patches of the dispatcher: compute some experts where their tokens are, with weights sent by the owner.

The tokens of experts received by this rank are removed from the routing map, so the dispatcher handles only
the other tokens. The state of a forward is stored on the dispatcher, like Megatron's own state, and removed
in the last step. If a schedule splits the layer into parts with separate graphs, the state is passed between
them as a :class:`~mindspeed_dsa.megatron.split_layers.Companion`.

Every rank creates the same autograd nodes in every forward, even if no expert is moved. Overlapped gradient
reduction requires this: a weight must get the same number of gradients in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.moe.balanced_experts.chains import Lane
from mindspeed_dsa.features.moe.balanced_experts.feature import Options, check_balanced
from mindspeed_dsa.features.moe.balanced_experts.planning import (
    Plan,
    chain_of,
    choose,
    nodes_of,
    rates_of,
)
from mindspeed_dsa.features.moe.balanced_experts.weight_transfer import MovedExpert, WeightTransfer
from mindspeed_dsa.features.moe.experts import SingleExperts, single_experts
from mindspeed_dsa.features.moe.numbering import order_of
from mindspeed_dsa.megatron.configuration import require
from mindspeed_dsa.megatron.split_layers import Companion, Cut, accompany, companion_of, in_pieces
from mindspeed_dsa.ops.moe_permute.row_map import of_routing
from mindspeed_dsa.parallel.names import named
from mindspeed_dsa.platforms.host_pool import upload

Call = Callable[..., Any]


class _Layer:
    """Experts and process group of one MoE layer; holds no tensors except the layer's weights."""

    def __init__(self, module: Any, router: Any, dispatcher: Any) -> None:
        self.experts, self._module, self._router = single_experts(module), module, router
        self.count: int = dispatcher.num_local_experts
        self.group = dispatcher.ep_group
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._parameters: list[Tensor] = []

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters that may be sent, without duplicates.

        Raises:
            RuntimeError: FSDP2 frees them before the layer is done.
        """
        # FSDP2 has other parameters between forwards, and may make new ones.
        if not self._parameters or self.experts.expert_weights(0)[0].parameter is not self._parameters[0]:
            weights = (
                weight for expert in range(self.count) for weight in self.experts.expert_weights(expert)
            )
            self._parameters = list({id(weight.parameter): weight.parameter for weight in weights}.values())
            if any(isinstance(module, FSDPModule) for module in self._module.modules()):
                raise RuntimeError(
                    "balanced-moe-experts: FSDP2 gathers the weights of experts only for their own products, "
                    "because they are units of their own; remove their class from sub_modules_to_wrap in "
                    "--fsdp2-config-path, or omit --balanced-moe-experts"
                )
        return self._parameters

    def number_of(self, slot: int) -> int:
        """Return the number of the expert in a slot, which ``--moe-expert-placement`` may have changed."""
        order = order_of(self._router)
        return slot if order is None else order[slot]

    @cached_property
    def shapes(self) -> list[torch.Size]:
        """Shapes of one expert's weights."""
        return [weight.of(weight.parameter).shape for weight in self.experts.expert_weights(0)]

    def gathered(self, counts: Tensor) -> tuple[Any, list[bool]]:
        """All-gather row counts, and a trained flag per expert. Synchronizes with the device.

        Args:
            counts: number of this rank's rows per expert, ``[experts]``.

        Returns:
            Counts ``[ranks, experts]`` on the host, and one flag per expert: whether it is trained.
        """
        learning = torch.tensor([self._learns(expert) for expert in range(self.count)], dtype=counts.dtype)
        mine = torch.cat((counts, upload(learning, counts.device)))
        all_ranks = mine.new_empty(self.ranks * mine.numel())
        with named("tokens of experts"):
            dist.all_gather_into_tensor(all_ranks, mine, group=self.group)
        # [ranks, experts + local experts]: counts, then flags of the rank's own experts.
        table = all_ranks.cpu().numpy().reshape(self.ranks, -1)
        experts = counts.numel()
        return table[:, :experts], [bool(flag) for flag in table[:, experts:].ravel()]

    def _learns(self, expert: int) -> bool:
        flags = {weight.parameter.requires_grad for weight in self.experts.expert_weights(expert)}
        if len(flags) > 1:
            raise RuntimeError(
                f"balanced-moe-experts: some weights of local expert {expert} are frozen and some are not; "
                "freeze all of them or none, or omit --balanced-moe-experts"
            )
        return flags == {True}


@dataclass
class _Forward(Companion):
    """State of one forward of one layer, kept between the dispatcher's methods.

    Attributes:
        transfer: transfer of the moved experts' weights.
        counts: number of this rank's tokens for each expert whose weights it receives.
        cold: number of rows (token copies) left to the dispatcher.
        indices: tokens of the received experts, sorted by expert, ``[rows]``; one row per token and expert.
        rows: hidden states of ``indices``, later the experts' outputs, ``[rows, hidden]``.
        probs: routing probabilities of ``indices``, ``[rows]``.
    """

    transfer: WeightTransfer
    counts: list[int]
    cold: int
    indices: Tensor
    rows: Tensor
    probs: Tensor

    def leave_router(self, cut: Cut) -> None:
        """Detach the kept tokens, and start sending the weights. Called between router and experts."""
        self.rows = cut(self.rows)
        if self.counts:  # without rows the probabilities get no gradient
            self.probs = cut(self.probs)
        self.transfer.launch()

    def enter_experts(self) -> None:
        """Create the node that waits for moved experts' gradients; see :meth:`WeightTransfer.announce`."""
        self.transfer.announce()

    def leave_experts(self, cut: Cut) -> None:
        """Detach the outputs of the received experts. Called after the experts, during the combine."""
        self.rows = cut(self.rows)


_LAYER = "_mindspeed_dsa_experts"


def layer_of(dispatcher: Any) -> _Layer | None:
    """Return the layer attached to a dispatcher (or to a copy of it), or ``None``."""
    layer: _Layer | None = getattr(dispatcher, _LAYER, None)
    return layer


def know_experts(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Wrap ``MoELayer.__init__``: attach the layer's experts to its dispatcher."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        require(context, check_balanced, config)
        original(self, config, *args, **kwargs)
        dispatcher = self.token_dispatcher
        setattr(dispatcher, _LAYER, _Layer(self.experts, self.router, dispatcher))

    return __init__


def keep_hot_tokens(original: Call, context: Context[Options]) -> Call:
    """Wrap ``dispatch_preprocess``: choose the experts to move; hide their tokens from the dispatcher."""
    lanes: WeakKeyDictionary[Any, Lane] = WeakKeyDictionary()  # by process group

    def dispatch_preprocess(
        self: Any, hidden_states: Tensor, routing_map: Tensor, probs: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        layer = layer_of(self)
        if layer is None:
            return original(self, hidden_states, routing_map, probs, *args, **kwargs)
        hidden = hidden_states.size(-1)
        parameters = layer.parameters
        # Overlapped parameter gathering may not have delivered the weights yet.
        layer.experts.wait_for_weights()
        rates = rates_of(layer.experts, hidden, layer.group, context)
        costs = rates.costs(layer.shapes, hidden, hidden_states.dtype)
        counts, learning = layer.gathered(routing_map.sum(dim=0))
        plan = choose(counts, costs, context.options.hot_experts)
        moved = _moved(layer, plan, counts, learning, nodes_of(layer.group, context))
        if moved:
            context.log.info(
                "experts %s travel to their tokens, the first that do: forward and backward of a layer's "
                "experts are expected to take %.3g ms instead of %.3g",
                ", ".join(str(expert.number) for expert in moved),
                1e3 * plan.after,
                1e3 * plan.before,
                once="the first that do",
                ranks="stage",
            )
        lane = lanes.setdefault(layer.group, Lane())
        transfer = WeightTransfer(moved, parameters, layer.shapes, layer.group, lane)
        forward, cold_map = _split(transfer, counts, hidden_states, routing_map, probs)
        if not in_pieces(self):
            # Created first, so it runs last in backward: the gradients have the most time to arrive.
            forward.transfer.announce()
        accompany(self, forward)
        return original(self, hidden_states, cold_map, probs, *args, **kwargs)

    return dispatch_preprocess


def count_cold_tokens(original: Call) -> Call:
    """Wrap ``preprocess``: correct ``num_out_tokens``, from which fused kernels compute the output size."""

    def preprocess(self: Any, routing_map: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, routing_map, *args, **kwargs)
        forward = companion_of(self)
        if isinstance(forward, _Forward):
            # A tensor, as Megatron uses with an expert capacity. From an int, kernels would conclude that
            # every token goes to the same number of experts.
            self.num_out_tokens = torch.tensor(forward.cold)
        return result

    return preprocess


def send_weights(original: Call) -> Call:
    """Wrap ``dispatch_postprocess``: start sending weights, which overlaps with the local experts."""

    def dispatch_postprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        forward = companion_of(self)
        if isinstance(forward, _Forward):
            forward.transfer.launch()
        return result

    return dispatch_postprocess


def run_hot_experts(original: Call) -> Call:
    """Wrap ``combine_preprocess``: run the received experts on this rank's own tokens."""

    def combine_preprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        forward, layer = companion_of(self), layer_of(self)
        if isinstance(forward, _Forward) and layer is not None:
            # In backward this comes after the combine's transfer and before the dispatched tokens' experts,
            # which hide the transfer of the weight gradients.
            _run(layer.experts, forward)
        return original(self, *args, **kwargs)

    return combine_preprocess


def add_hot_outputs(original: Call) -> Call:
    """Wrap ``combine_postprocess``: add the outputs of the received experts."""

    def combine_postprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        forward = companion_of(self)
        if not isinstance(forward, _Forward):
            return output
        accompany(self, None)
        forward.transfer.settle()
        # [tokens, hidden]. Also with 0 rows: backward through this node starts the gradients' transfer.
        # Not in place: the dispatcher's output may be a view made by a custom function, and others may
        # have hooks on its gradient.
        total = output.view(-1, output.size(-1)).index_add(0, forward.indices, forward.rows.to(output.dtype))
        return total.view_as(output)

    return combine_postprocess


def _moved(
    layer: _Layer, plan: Plan, counts: Any, learning: list[bool], nodes: Sequence[int]
) -> list[MovedExpert]:
    """Return the moved experts. All ranks need the chains of all experts to match their messages."""
    moved = []
    for slot in plan.experts:
        owner = slot // layer.count
        receivers = [int(rank) for rank in np.flatnonzero(counts[:, slot]) if rank != owner]
        weights = layer.experts.expert_weights(slot % layer.count) if owner == layer.rank else ()
        chain = chain_of(owner, receivers, nodes)
        moved.append(MovedExpert(slot, layer.number_of(slot), owner, chain, learning[slot], weights))
    return moved


def _split(
    transfer: WeightTransfer,
    counts: Any,
    hidden_states: Tensor,
    routing_map: Tensor,
    probs: Tensor,
) -> tuple[_Forward, Tensor]:
    """Split the tokens: return the state of those for received experts, and the other tokens' routing map."""
    received = [expert.slot for expert in transfer.received]
    rows = [int(counts[transfer.rank, slot]) for slot in received]
    cold_map = routing_map
    indices = torch.zeros(0, dtype=torch.int32, device=routing_map.device)
    places = indices
    if received:
        columns = upload(torch.tensor(received), routing_map.device)
        # The dispatcher does not see the tokens of received experts.
        cold_map = routing_map.index_fill(1, columns, False)
        # Sorted by expert, then by token. The size is known on the host, so nothing waits for the device.
        row_map = of_routing(routing_map.index_select(1, columns), sum(rows))
        indices = row_map.tokens
        # Flat index into probs [tokens, experts]: with 64 experts, token 3 of expert 5 is 3 * 64 + 5 = 197.
        places = indices * routing_map.size(1) + columns.index_select(0, row_map.experts)
    forward = _Forward(
        transfer=transfer,
        counts=rows,
        cold=int(counts[transfer.rank].sum()) - sum(rows),
        indices=indices,
        rows=hidden_states.view(-1, hidden_states.size(-1)).index_select(0, indices),
        probs=probs.reshape(-1).index_select(0, places),
    )
    return forward, cold_map


def _run(experts: SingleExperts, forward: _Forward) -> None:
    """Replace ``forward.rows`` by the received experts' outputs."""
    rows, weights = forward.transfer.wait(forward.rows)
    outputs = [
        experts.run_expert(expert, part, probs)
        for expert, part, probs in zip(
            weights, rows.split(forward.counts), forward.probs.split(forward.counts), strict=True
        )
    ]
    # With 0 received experts keep `rows`: their graph has the wait node, which all ranks need.
    forward.rows = torch.cat(outputs) if outputs else rows
