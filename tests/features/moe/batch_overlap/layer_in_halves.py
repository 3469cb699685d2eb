"""Worker functions: a MoE layer in two halves, and the stock layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.log import Log
from tests.features.moe.alltoall_overlap.overlapped_layer import switch_on
from tests.support import model, moe

MEASURED = {"moe_batch_overlap": True, "moe_batch_overlap_attention": False}
ALWAYS = {**MEASURED, "moe_batch_overlap_always": True}
ATTENTION = {**ALWAYS, "moe_batch_overlap_attention": True}
Times = Mapping[str, float]
FASTER: Times = {"whole": 1.0, "in turn": 1.1, "interleaved": 0.8}
SLOWER: Times = {"whole": 1.0, "in turn": 1.3, "interleaved": 1.2}


@contextlib.contextmanager
def times(seconds: Times) -> Iterator[list[str]]:
    """Set the time that each way of a layer's forward seems to take on this rank; yields the ways run."""
    from mindspeed_dsa.features.moe.batch_overlap import choice

    ways: list[str] = []

    def timed(work: Any, group: Any) -> float:
        work()
        ways.extend(work.args)
        return seconds[ways[-1]]

    with mock.patch.object(choice, "timed", timed):
        yield ways


def measured(switch: Mapping[str, Any]) -> dict[str, Any]:
    """Run three layers, two of one size, stock and ours, and return everything that a forward may change.

    For the first size, rank 0 finds halves faster and rank 1 slower. For the other size both find them
    faster.

    Args:
        switch: feature switches of our run.
    """
    model.start(ep=2, etp=1)
    theirs = _measured()
    switch_on(switch)
    return {"ours": _measured(), "theirs": theirs}


def _measured() -> dict[str, Any]:
    # All options that draw random numbers, log losses or count tokens.
    overrides = {
        "moe_input_jitter_eps": 0.1,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.1,
        "moe_z_loss_coeff": 0.1,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }
    record: dict[str, Any] = {"runs": [], "launched": [], "ways": [], "lines": []}
    by_layer = [SLOWER if dist.get_rank() else FASTER] * 2 + [FASTER]
    torch.manual_seed(7)

    def info(_: Any, line: str, *args: Any, **kwargs: Any) -> None:
        record["lines"].append(line % args)

    with mock.patch.object(Log, "info", info):
        for number, seconds in enumerate(by_layer):
            width = {"moe_ffn_hidden_size": 16 if number < 2 else 24}
            built = moe.layer(moe.config(ep=2, **overrides, **width))
            inputs = [moe.tokens(5 + dist.get_rank(), seed=dist.get_rank()) for _ in range(2)]
            with times(seconds) as ways, moe.transfers() as events:
                result = moe.train(built, inputs)
            result["weights"]["counts"] = built.router.local_tokens_per_expert
            result["weights"]["random state"] = torch.get_rng_state().float()
            record["runs"].append(result)
            record["launched"].append(events.count("launch"))
            record["ways"].append(len(ways))
    return record


def balancing(kind: str | list[str], coeff: Any) -> dict[str, Any]:
    """Return the load-balancing losses that Megatron logs, and the router's gradient, stock and ours."""
    model.start(ep=2, etp=1)
    overrides = {
        "moe_router_load_balancing_type": kind,
        "moe_aux_loss_coeff": coeff,
        "moe_z_loss_coeff": 0.1,
    }
    results = {}
    for name in ("theirs", "ours"):
        if name == "ours":
            switch_on(ALWAYS)
        results[name] = _balanced(overrides)
    return results


def _balanced(overrides: Mapping[str, Any]) -> dict[str, Any]:
    from megatron.core.transformer.moe import moe_utils

    # Losses of earlier runs are still in Megatron's tracker.
    moe_utils.clear_aux_losses_tracker()
    built = moe.layer(moe.config(ep=2, **overrides))
    result = moe.train(built, [moe.tokens(6, seed=dist.get_rank())])
    tracker = moe_utils.get_moe_layer_wise_logging_tracker()
    losses: dict[str, Tensor] = {name: entry["values"].clone() for name, entry in tracker.items()}
    return {**result, "losses": losses}
