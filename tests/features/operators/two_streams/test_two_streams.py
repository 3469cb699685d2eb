"""The same bits on two streams, and nothing that is read before it is there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from mindspeed_dsa import features, platforms
from mindspeed_dsa.features.operators.two_streams import second_stream
from tests.support import memory_events, model
from tests.support.contexts import context
from tests.support.stream_order import OrderedPlatform, OrderedStream, watched

# -- what runs in the pool's workers ---------------------------------------------------------------


ON = {"two_streams": True}


def step(**arguments: Any) -> dict[str, Any]:
    """A step as :func:`model.run` makes it, and how often something was started on the second stream."""
    with memory_events.counted() as counts:
        result = model.run(num_microbatches=2, **arguments)
    return {**result, "starts": counts[memory_events.BESIDE]}


def watched_layer(dropped: Sequence[int | None]) -> list[dict[str, Any]]:
    """Races in a layer's forward and backward, each time without one of the waits for events.

    Args:
        dropped: which wait is left out, in the order of a forward; ``None``: none is.
    """
    model.start(ON)
    layer = model.gpt_model(model.config()).train().decoder.layers[-1]
    return [_watch(layer, number) for number in dropped]


def _watch(layer: Any, dropped: int | None) -> dict[str, Any]:
    wait, keep = OrderedStream.wait_event, OrderedPlatform.record_stream
    waits: list[OrderedStream] = []
    kept: list[tuple[int, bool]] = []

    def wait_unless_dropped(self: OrderedStream, event: Any) -> None:
        waits.append(self)
        if len(waits) - 1 != dropped:
            wait(self, event)

    def keep_and_note(self: OrderedPlatform, tensor: torch.Tensor, stream: Any) -> None:
        kept.append((tensor.size(-1), stream is self.host))
        keep(self, tensor, stream)

    with (
        mock.patch.object(OrderedStream, "wait_event", wait_unless_dropped),
        mock.patch.object(OrderedPlatform, "record_stream", keep_and_note),
        watched(results=True) as platform,
    ):
        hidden = torch.randn(model.SEQUENCE, 2, 32, generator=torch.Generator().manual_seed(1))
        output, _ = layer(hidden.requires_grad_(), attention_mask=None)
        output.backward(torch.ones_like(output))
    return {"races": platform.races, "waits": len(waits), "kept": kept}


CASES = "tests.features.operators.two_streams.test_two_streams"
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "shared_experts"]}
RUNS = {
    "as it is": {},
    "fused DSA": {"switches": {"use_fused_dsa": True}},
    "attention and shared expert recomputed": {"overrides": SELECTIVE},
    "overlapped gathering": {
        "ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True, "use_distributed_optimizer": True}
    },
}
OTHERS = {
    "layers recomputed": {"overrides": FULL},
    "recomputed norms and activations": {
        "switches": {"recompute_norm": True, "recompute_activation_function": True}
    },
    "fused operators": {"switches": {"fused_operators": ["all"]}},
    "grouped experts": {
        "switches": {"moe_grouped_gemm": True, "moe_permute_fusion": True},
        "overrides": {"moe_grouped_gemm": True, "moe_permute_fusion": True},
    },
    "EP2": {"ep": 2},
    "PP2": {"pp": 2},
    "TP2+SP": {"tp": 2},
}
STARTS = {
    "layers recomputed": [12],  # the layers' second pass starts them again
    "EP2": [6, 6],
    "PP2": [2, 4],  # the first stage has the dense layer
    "TP2+SP": [0, 0],
}
"""Of each rank; else those of two attentions and a shared expert, in two microbatches."""


@pytest.mark.parametrize("name", [*RUNS, *(pytest.param(each, marks=pytest.mark.full) for each in OTHERS)])
def test_the_same_bits(pool, name):
    arguments = dict({**RUNS, **OTHERS}[name])
    switches, ranks = arguments.pop("switches", {}), len(STARTS.get(name, [6]))
    one = pool.run(f"{CASES}:step", ranks, switches=switches, **arguments)
    two = pool.run(f"{CASES}:step", ranks, switches={**switches, "two_streams": True}, **arguments)
    assert [each["starts"] for each in one] == [0] * ranks
    assert [each["starts"] for each in two] == STARTS.get(name, [6])
    for theirs, ours in zip(one, two, strict=True):
        assert len(ours["losses"]) == len(theirs["losses"])
        assert all(map(torch.equal, ours["losses"], theirs["losses"]))
        assert ours["gradients"].keys() == theirs["gradients"].keys()
        for parameter, gradient in theirs["gradients"].items():
            assert torch.equal(ours["gradients"][parameter], gradient), parameter


def test_a_wait_that_is_missing_is_a_race(pool):
    (found,) = pool.run(f"{CASES}:watched_layer", 1, dropped=[None, 0, 1, 2, 3])
    complete, *others = found
    assert complete["races"] == []
    assert complete["waits"] == 4, "there and back, for the indexer and for the shared expert"
    second, first = False, True
    assert complete["kept"] == [(32, second), (16, first), (4, first), (32, second), (32, first)], (
        "the other stream's use of each tensor that crosses is known to the allocator"
    )
    for number, without in enumerate(others):
        assert without["races"], f"nobody missed wait {number}"


def test_one_stream_is_said(caplog, monkeypatch):
    (feature,) = (each for each in features.built_in() if each.name == "two-streams")
    own = context(feature.name)
    with caplog.at_level(logging.INFO):
        second_stream.say_how_many(own)
        monkeypatch.setattr(platforms, "_current", OrderedPlatform())
        second_stream.say_how_many(own)
    assert [each.getMessage() for each in caplog.records] == [
        "--two-streams: cpu has one stream, so everything runs in turns"
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "has neither an indexer nor a shared expert"),
        ({"experimental_attention_variant": "dsa", "moe_shared_expert_overlap": True}, "omit one of them"),
        ({"moe_shared_expert_intermediate_size": 8, "cuda_graph_impl": "local"}, "omit --cuda-graph-impl"),
        *(
            ({"moe_shared_expert_intermediate_size": 8, name: True}, said)
            for name, said in {
                "overlap_moe_expert_parallel_comm": "cannot be used with --overlap-moe-expert-parallel-comm",
                "cpu_offloading": "cannot be used with --cpu-offloading-num-layers",
                "use_megatron_fsdp": "cannot be used with --use-megatron-fsdp",
                "use_custom_fsdp": "cannot be used with --use-custom-fsdp",
            }.items()
        ),
        ({"moe_shared_expert_intermediate_size": 8}, None),
        ({"experimental_attention_variant": "dsa", "cuda_graph_impl": "none"}, None),
    ],
)
def test_refusals(given, said):
    from types import SimpleNamespace

    (feature,) = (each for each in features.built_in() if each.name == "two-streams")
    found = list(feature.problems(SimpleNamespace(**given)))
    assert len(found) == (said is not None)
    assert said is None or said in found[0]
