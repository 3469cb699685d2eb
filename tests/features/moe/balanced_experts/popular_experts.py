"""Worker functions: one MoE layer with a chosen popularity of experts."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from mindspeed_dsa import log
from mindspeed_dsa.parallel import names
from tests.support import model, moe

ALWAYS = {
    "balanced_moe_experts": True,
    "balanced_moe_matmul_rate": 1e-6,
    "balanced_moe_link_rate": 1e6,
}
"""Costs of slow matmuls and a fast link, so that every move that balances better pays."""
NEVER = {**ALWAYS, "balanced_moe_matmul_rate": 1e6, "balanced_moe_link_rate": 1e-6}
_SHARE = 8.0
"""Value of the input feature that carries an expert's popularity."""


def train(
    switches: Mapping[str, Any],
    popularity: Sequence[Any],
    rows: Sequence[int] = (24,),
    overrides: Mapping[str, Any] | None = None,
    frozen: Sequence[int] = (),
    **layout: Any,
) -> dict[str, Any]:
    """Run the forward of microbatches with given expert popularities, then their backward.

    Args:
        switches: feature switches.
        popularity: per microbatch, ``[experts]`` values added to the logits of all its tokens; or one list
            of them per rank.
        rows: number of tokens per rank, or one number for all ranks.
        overrides: config fields that differ from the layer's.
        frozen: global numbers of experts with frozen weights.
        **layout: arguments of :func:`model.start`.
    """
    from megatron.core import parallel_state

    model.start(switches, **layout)
    own = [logits[dist.get_rank()] if isinstance(logits[0], list) else logits for logits in popularity]
    config = moe.config(
        layout.get("tp", 1), layout.get("ep", 1), num_moe_experts=len(own[0]), **(overrides or {})
    )
    layer = moe.layer(config)
    with torch.no_grad():
        # The router's column `index` holds the logits of microbatch `index`.
        for index, logits in enumerate(own):
            layer.router.weight[:, index] = torch.tensor(logits) / _SHARE
    for number in set(frozen) & set(layer.local_expert_indices):
        layer.experts.local_experts[number - layer.local_expert_indices[0]].requires_grad_(False)
    batches = []
    for index in range(len(popularity)):
        tokens = rows[dist.get_rank()] if len(rows) > 1 else rows[0]
        batch = moe.tokens(tokens, 17 * dist.get_rank() + index, batch=1)
        # In each microbatch only its own feature is set.
        batch[..., : len(popularity)] = 0
        batch[..., index] = _SHARE
        batches.append(batch)
    # Otherwise lines that were logged once would be missing.
    log.forget()
    with redirect_stderr(io.StringIO()) as said, watched() as found:
        results = moe.train(layer, batches)
    group = dist.get_process_group_ranks(parallel_state.get_expert_model_parallel_group())
    return {**found, **results, "said": said.getvalue().splitlines(), "first rank": group[0]}


@contextmanager
def watched() -> Iterator[dict[str, Any]]:
    """Record the plans, the dispatched rows and the messages that carry weights, inside the block.

    Yields:
        Record. Entries of ``links`` are bytes by direction (``out`` or ``in``) and name of the message.
    """
    found: dict[str, Any] = {"plans": [], "dispatched": [], "counts": [], "sent": 0, "links": Counter()}
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from mindspeed_dsa.features.moe.balanced_experts import layer

    choose, isend, irecv = layer.choose, dist.isend, dist.irecv
    dispatch, preprocess = MoEAlltoAllTokenDispatcher.token_dispatch, MoEAlltoAllTokenDispatcher.preprocess

    def chosen(*arguments: Any) -> Any:
        plan = choose(*arguments)
        found["plans"].append(plan.experts)
        return plan

    def counted(self: Any, routing_map: Any) -> Any:
        found["counts"].append(routing_map.sum(dim=0).tolist())
        return preprocess(self, routing_map)

    def dispatched(self: Any, rows: Any, *arguments: Any) -> Any:
        if found["plans"]:  # a plain number would mean that every token goes to equally many experts
            assert isinstance(self.num_out_tokens, torch.Tensor)
            assert self.num_out_tokens == rows.size(0)
        found["dispatched"].append(rows.size(0))
        return dispatch(self, rows, *arguments)

    def sent(tensor: Any, *arguments: Any, **keywords: Any) -> Any:
        if (what := names.current().what) and " of expert " in what:
            found["sent"] += tensor.numel()
            found["links"]["out", what] += tensor.nbytes
        return isend(tensor, *arguments, **keywords)

    def received(tensor: Any, *arguments: Any, **keywords: Any) -> Any:
        if (what := names.current().what) and " of expert " in what:
            found["links"]["in", what] += tensor.nbytes
        return irecv(tensor, *arguments, **keywords)

    with (
        mock.patch.object(layer, "choose", chosen),
        mock.patch.object(MoEAlltoAllTokenDispatcher, "token_dispatch", dispatched),
        mock.patch.object(MoEAlltoAllTokenDispatcher, "preprocess", counted),
        mock.patch.object(dist, "isend", sent),
        mock.patch.object(dist, "irecv", received),
    ):
        yield found


def measured() -> dict[str, Any]:
    """Return the rates that two layers of one group use."""
    from mindspeed_dsa.features.moe.balanced_experts import layer, planning

    model.start({"balanced_moe_experts": True}, ep=2)
    config = moe.config(ep=2)
    figures: dict[str, Any] = {"rates": [], "measurements": 0}
    asked, measure = layer.rates_of, planning._measure

    def rates_of(*arguments: Any) -> Any:
        rates = asked(*arguments)
        figures["rates"].append((rates.matmul, rates.link))
        return rates

    def counting(*arguments: Any) -> Any:
        figures["measurements"] += 1
        return measure(*arguments)

    with mock.patch.object(layer, "rates_of", rates_of), mock.patch.object(planning, "_measure", counting):
        for built in (moe.layer(config), moe.layer(config)):
            moe.train(built, [moe.tokens(4, dist.get_rank())])
    return figures


def partly_frozen() -> None:
    """Build a layer in which one of an expert's two weights is frozen."""
    model.start(ALWAYS, ep=2)
    layer = moe.layer(moe.config(ep=2))
    layer.experts.local_experts[0].linear_fc1.weight.requires_grad_(False)
    layer(moe.tokens(4, dist.get_rank()))
