"""One MoE layer with chosen popularity of its experts, with and without balance; runs in the pool's workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

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
    rows: Sequence[int] = (12, 12),
    overrides: Mapping[str, Any] | None = None,
    frozen: Sequence[int] = (),
    **layout: Any,
) -> dict[str, Any]:
    """Microbatches with an expert popularity each: forward of all of them, then backward.

    Args:
        switches: features.
        popularity: for each microbatch, ``[experts]``: added to the logits of all its tokens.
        rows: by rank, of two tokens each.
        overrides: of the configuration.
        frozen: global numbers of experts whose weights do not learn.
        **layout: of :func:`model.start`.
    """
    model.start(switches, **layout)
    found: dict[str, Any] = {"plans": [], "dispatched": [], "sent": 0}
    config = moe.config(
        layout.get("tp", 1), layout.get("ep", 1), num_moe_experts=len(popularity[0]), **(overrides or {})
    )
    layer = moe.layer(config)
    with torch.no_grad():
        for index, logits in enumerate(popularity):
            layer.router.weight[:, index] = torch.tensor(logits) / _SHARE
    for name, parameter in moe.named_parameters(layer).items():
        if any(f"local_experts.{number}." in name for number in frozen):
            parameter.requires_grad_(False)
    batches = []
    for index in range(len(popularity)):
        batch = moe.tokens(rows[dist.get_rank()], 17 * dist.get_rank() + index)
        batch[..., : len(popularity)] = 0
        batch[..., index] = _SHARE
        batches.append(batch)
    with watched(found):
        found |= moe.train(layer, batches)
    return found


def watched(found: dict[str, Any]) -> ExitStack:
    """Record what is planned, how many rows are dispatched and how many messages travel with weights."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from mindspeed_dsa.features.moe.balanced_experts import layer
    from mindspeed_dsa.parallel import lending

    choose, dispatch = layer.choose, MoEAlltoAllTokenDispatcher.token_dispatch
    send = lending._Transfer.send

    def chosen(*arguments: Any) -> Any:
        plan = choose(*arguments)
        found["plans"].append(plan.experts)
        return plan

    def dispatched(self: Any, rows: Any, *arguments: Any) -> Any:
        found["dispatched"].append(rows.size(0))
        return dispatch(self, rows, *arguments)

    def sent(self: Any, tensor: Any, rank: int) -> None:
        found["sent"] += tensor.numel()
        send(self, tensor, rank)

    stack = ExitStack()
    stack.enter_context(mock.patch.object(layer, "choose", chosen))
    stack.enter_context(mock.patch.object(MoEAlltoAllTokenDispatcher, "token_dispatch", dispatched))
    stack.enter_context(mock.patch.object(lending._Transfer, "send", sent))
    return stack
