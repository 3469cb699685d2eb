"""One MoE layer whose experts are as popular as a case wants them; runs in the pool's workers."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stderr
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from mindspeed_dsa import log
from tests.support import model, moe

ALWAYS = {
    "balanced_moe_experts": True,
    "balanced_moe_matmul_rate": 1e-6,
    "balanced_moe_link_rate": 1e6,
}
"""Matmuls are slow and the link is fast: whatever balances better is moved."""
NEVER = {**ALWAYS, "balanced_moe_matmul_rate": 1e6, "balanced_moe_link_rate": 1e-6}
_SHARE = 8.0
"""Feature of the input that carries an expert's popularity."""


def train(
    switches: Mapping[str, Any],
    popularity: Sequence[Sequence[float]],
    rows: Sequence[int] = (24,),
    overrides: Mapping[str, Any] | None = None,
    frozen: Sequence[int] = (),
    **layout: Any,
) -> dict[str, Any]:
    """Microbatches with an expert popularity each: forward of all of them, then backward.

    Args:
        switches: features.
        popularity: for each microbatch, ``[experts]``: added to the logits of all its tokens.
        rows: tokens by rank, or of every rank.
        overrides: of the configuration.
        frozen: global numbers of experts whose weights do not learn.
        **layout: of :func:`model.start`.
    """
    model.start(switches, **layout)
    found: dict[str, Any] = {"plans": [], "dispatched": [], "counts": [], "sent": 0}
    config = moe.config(
        layout.get("tp", 1), layout.get("ep", 1), num_moe_experts=len(popularity[0]), **(overrides or {})
    )
    layer = moe.layer(config)
    with torch.no_grad():
        for index, logits in enumerate(popularity):
            layer.router.weight[:, index] = torch.tensor(logits) / _SHARE
    for number in set(frozen) & set(layer.local_expert_indices):
        layer.experts.local_experts[number - layer.local_expert_indices[0]].requires_grad_(False)
    batches = []
    for index in range(len(popularity)):
        own = rows[dist.get_rank()] if len(rows) > 1 else rows[0]
        batch = moe.tokens(own, 17 * dist.get_rank() + index, batch=1)
        batch[..., : len(popularity)] = 0
        batch[..., index] = _SHARE
        batches.append(batch)
    log.forget()
    with redirect_stderr(io.StringIO()) as said, watched(found):
        found |= moe.train(layer, batches)
    return {**found, "said": said.getvalue().splitlines()}


def watched(found: dict[str, Any]) -> ExitStack:
    """Record what is planned, how many rows are dispatched and how many messages travel with weights."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from mindspeed_dsa.features.moe.balanced_experts import layer, weight_transfer

    choose, send = layer.choose, weight_transfer._Messages.send
    dispatch, preprocess = MoEAlltoAllTokenDispatcher.token_dispatch, MoEAlltoAllTokenDispatcher.preprocess

    def chosen(*arguments: Any) -> Any:
        plan = choose(*arguments)
        found["plans"].append(plan.experts)
        return plan

    def counted(self: Any, routing_map: Any) -> Any:
        found["counts"].append(routing_map.sum(dim=0).tolist())
        return preprocess(self, routing_map)

    def dispatched(self: Any, rows: Any, *arguments: Any) -> Any:
        if found["plans"]:  # a plain number says that every token goes to equally many experts
            assert isinstance(self.num_out_tokens, torch.Tensor)
            assert self.num_out_tokens == rows.size(0)
        found["dispatched"].append(rows.size(0))
        return dispatch(self, rows, *arguments)

    def sent(self: Any, tensor: Any, rank: int) -> None:
        found["sent"] += tensor.numel()
        send(self, tensor, rank)

    stack = ExitStack()
    stack.enter_context(mock.patch.object(layer, "choose", chosen))
    stack.enter_context(mock.patch.object(MoEAlltoAllTokenDispatcher, "token_dispatch", dispatched))
    stack.enter_context(mock.patch.object(MoEAlltoAllTokenDispatcher, "preprocess", counted))
    stack.enter_context(mock.patch.object(weight_transfer._Messages, "send", sent))
    return stack


def measured() -> dict[str, Any]:
    """Rates that two layers of one group use."""
    from mindspeed_dsa.features.moe.balanced_experts import layer, planning

    model.start({"balanced_moe_experts": True}, ep=2)
    config = moe.config(ep=2)
    found: dict[str, Any] = {"rates": [], "measurements": 0}
    asked, measure = layer.rates_of, planning._measure

    def rates_of(*arguments: Any) -> Any:
        known = asked(*arguments)
        found["rates"].append((known.matmul, known.link))
        return known

    def counting(*arguments: Any) -> Any:
        found["measurements"] += 1
        return measure(*arguments)

    with mock.patch.object(layer, "rates_of", rates_of), mock.patch.object(planning, "_measure", counting):
        for built in (moe.layer(config), moe.layer(config)):
            moe.train(built, [moe.tokens(4, dist.get_rank())])
    return found


def partly_frozen() -> None:
    """Weights of one expert, of which the first does not learn."""
    model.start(ALWAYS, ep=2)
    layer = moe.layer(moe.config(ep=2))
    layer.experts.local_experts[0].linear_fc1.weight.requires_grad_(False)
    layer(moe.tokens(4, dist.get_rank()))
