"""Padding between documents does not change a router's losses, loads and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mindspeed_dsa.features.moe.load_report import steps
from mindspeed_dsa.features.moe.load_report.feature import Options
from tests.features.attention.packs.documents import LENGTHS, prefix_sums, tokens_of
from tests.support import model as job
from tests.support.model import assert_same_gradients

CASE = f"{__name__}:one_pass"
ABSENT, BEHIND, BETWEEN = (0, 0, 0, 0, 0), (0, 0, 0, 0, 16), (3, 0, 6, 2, 5)
ROUTED = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.1,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
FULL_RECOMPUTATION = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
OF_EXPERTS = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def one_pass(
    gaps: tuple[int, ...], overrides: Mapping[str, Any] | None = None, tp: int = 1
) -> dict[str, Any]:
    """Return losses and gradients of documents, each followed by padding, and the router's counts."""
    # With tensor parallelism each rank has a part of the rows, so only router gradients are compared, summed.
    sizes = {"tensor_model_parallel_size": tp, "sequence_parallel": tp > 1}
    job.start({"use_fused_dsa": True, "pack_documents": True, **sizes}, tp=tp)
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.moe import moe_utils

    moe_utils.clear_aux_losses_tracker()
    sums = prefix_sums(LENGTHS)
    places = prefix_sums([length + gap for length, gap in zip(LENGTHS, gaps, strict=True)])
    rows = torch.cat(
        [
            torch.arange(end - begin) + at
            for (begin, end), at in zip(pairwise(sums.tolist()), places.tolist(), strict=False)
        ]
    )
    tokens, labels = (torch.full((1, int(places[-1])), 7).index_copy(1, rows, x) for x in tokens_of(LENGTHS))
    cfg = job.config(**{**ROUTED, **(overrides or {})}, **sizes)
    with mock.patch.object(job, "SEQUENCE", tokens.size(1)):
        model = job.gpt_model(cfg)
    longest = int(places.diff().max())
    params = PackedSeqParams("thd", sums, sums, places, places, max_seqlen_q=longest, max_seqlen_kv=longest)
    losses = model(tokens, torch.zeros_like(tokens), None, labels=labels, packed_seq_params=params)[0, rows]
    losses.mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    loads = [m.local_tokens_per_expert for m in model.modules() if hasattr(m, "local_tokens_per_expert")]
    logged = {
        name: entry["values"].clone()
        for name, entry in moe_utils.get_moe_layer_wise_logging_tracker().items()
    }
    if tp > 1:
        gradients = {name: entry for name, entry in gradients.items() if name.endswith("router.weight")}
        for entry in (*gradients.values(), *loads):
            dist.all_reduce(entry)
        logged = {}
    return {"losses": losses.detach(), "gradients": gradients, "loads": loads, "logged": logged}


@pytest.mark.parametrize(
    ("tp", "overrides"),
    [
        pytest.param(1, {}, marks=pytest.mark.full),
        (2, {}),
        pytest.param(1, FULL_RECOMPUTATION, marks=pytest.mark.full),
        pytest.param(1, OF_EXPERTS, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_padding_is_not_counted_wherever_it_lies(pool, tp, overrides):
    absent, behind, between = (
        pool.run(CASE, tp, gaps=gaps, overrides=overrides, tp=tp)[0] for gaps in (ABSENT, BEHIND, BETWEEN)
    )
    assert absent["gradients"]
    assert sum(int(load.sum()) for load in absent["loads"]) == sum(LENGTHS) * 2 * len(absent["loads"]) > 0
    for padded in (behind, between):
        torch.testing.assert_close(padded["losses"], absent["losses"], rtol=1e-5, atol=1e-5)
        assert [load.tolist() for load in padded["loads"]] == [load.tolist() for load in absent["loads"]]
        assert padded["logged"].keys() == absent["logged"].keys()
        for name, values in absent["logged"].items():
            torch.testing.assert_close(padded["logged"][name], values, rtol=1e-5, atol=0)
        assert_same_gradients(padded["gradients"], absent["gradients"], 1e-5)


def test_the_load_report_leaves_out_what_the_router_is_told_of(monkeypatch):
    counted = []
    found = SimpleNamespace(add=lambda _, each: counted.append(each.sum(0).tolist()))
    monkeypatch.setattr(steps, "counts_of", lambda _: found)
    routing_map = torch.tensor([[1, 0], [1, 1], [0, 1]]).bool()
    context = SimpleNamespace(options=Options(Path("loads")))
    forward = steps.count_tokens(lambda self, input, padding_mask=None: (None, routing_map), context)
    for mask in (None, torch.tensor([[False], [True], [False]])):
        forward(SimpleNamespace(training=True), torch.zeros(3, 1, 4), mask)
    assert counted == [[2, 2], [1, 1]]
