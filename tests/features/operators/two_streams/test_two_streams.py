"""Two streams give the same bits, and no stream reads a tensor before it is written."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from mindspeed_dsa import features, platforms
from mindspeed_dsa.features.operators.two_streams import layer as beside
from mindspeed_dsa.features.operators.two_streams.feature import Options
from mindspeed_dsa.megatron import second_stream
from tests.features.dsa import cp_cases
from tests.support import memory_events, model
from tests.support.contexts import context
from tests.support.stream_order import OrderedPlatform, OrderedStream, backward_by_streams, watched

# -- functions that run in the pool's workers ------------------------------------------------------


ON = {"two_streams": True}


def step(**arguments: Any) -> dict[str, Any]:
    """Run a step of :func:`model.run`; also return the counts of starts, waits and used products."""
    run = cp_cases.step if "cp" in arguments else partial(model.run, num_microbatches=2)
    with memory_events.counted() as counts:
        result = run(**arguments)
    events = (memory_events.BESIDE, memory_events.AWAITED, memory_events.TAKEN)
    return {**result, "starts": [counts[event] for event in events]}


def watched_layer(
    dropped: Sequence[int | None],
    tokens: int = 0,
    switches: Mapping[str, Any] | None = None,
    **layout: int,
) -> list[dict[str, Any]]:
    """Return the races of a layer's forward and backward, each time without one of the event waits.

    Args:
        dropped: indices of the waits to omit, in forward order; ``None`` omits none.
        tokens: token count below which one stream is used.
        switches: further feature switches.
        **layout: arguments of :func:`model.start`.
    """
    model.start({**ON, "two_streams_min_tokens": tokens, **(switches or {})}, **layout)
    tp = layout.get("tp", 1)
    cfg = model.config(tensor_model_parallel_size=tp, sequence_parallel=tp > 1)
    layer = model.gpt_model(cfg).train().decoder.layers[-1]
    return [_watch(layer, number, tp) for number in dropped]


def _watch(layer: Any, dropped: int | None, parts: int) -> dict[str, Any]:
    wait, keep = OrderedStream.wait_event, OrderedPlatform.record_stream
    waits: list[OrderedStream] = []
    kept: list[tuple[int, bool]] = []

    def wait_unless_dropped(self: OrderedStream, event: Any) -> None:
        waits.append(self)
        # Autograd's task number is -1 outside of backward.
        in_backward = torch._C._current_graph_task_id() != -1
        beside = self is second_stream.second() and in_backward
        if beside if dropped == BACKWARD else len(waits) - 1 == dropped:
            return
        wait(self, event)

    def keep_and_note(self: OrderedPlatform, tensor: torch.Tensor, stream: Any) -> None:
        # The last dimension tells which tensor it is; the stream is the first or the second.
        kept.append((tensor.size(-1), stream is self.host))
        keep(self, tensor, stream)

    with (
        mock.patch.object(OrderedStream, "wait_event", wait_unless_dropped),
        mock.patch.object(OrderedPlatform, "record_stream", keep_and_note),
        watched(results=True) as platform,
        backward_by_streams(platform),
    ):
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn(model.SEQUENCE // parts, 2, 32, generator=generator)
        output, _ = layer(hidden.requires_grad_(), attention_mask=None)
        torch.autograd.backward(output, torch.ones_like(output))
    # Accumulators of weight gradients that autograd runs on the second stream.
    second = [node for node, stream in platform._accumulators.items() if stream is not platform.host]
    return {
        "races": platform.races,
        "waits": len(waits),
        "kept": kept,
        "freed early": list(platform.freed_early),
        "accumulated beside": len(second),
    }


BACKWARD = -1
"""Index that omits all of the second stream's waits in backward."""
CASES = "tests.features.operators.two_streams.test_two_streams"
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "shared_experts"]}
FUSED = {"use_fused_dsa": True}
SWAPPED = {
    "swap_attention": True,
    "swap_modules": "input_norm,self_attention,post_attention_norm",
    "swap_attention_min_bytes": 0,
}
CP = {"context_parallel_size": 2, "cp_comm_type": "allgather"}
DATA = {"overlap_grad_reduce": True, "overlap_param_gather": True, "use_distributed_optimizer": True}
RUNS: dict[str, dict[str, Any]] = {
    "attention and shared expert recomputed": {"overrides": SELECTIVE},
    "CP2": {"cp": 2, "switches": FUSED, "overrides": CP},
}
OTHERS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "fused DSA": {"switches": FUSED},
    "overlapped gathering": {"ddp": DATA},
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
    "TP2+SP": {"tp": 2},
    "swapped attention": {"switches": {**FUSED, **SWAPPED}},
    "PP2": {"pp": 2},
    "TP2+SP, fused DSA": {"tp": 2, "switches": FUSED},
    "TP2+SP, in chunks": {"tp": 2, "switches": {"coc_parallel_num": 2}},
    "TP2+SP x CP2": {"tp": 2, "cp": 2, "switches": FUSED, "overrides": CP},
    "swapped, recomputed": {"switches": SWAPPED, "overrides": SELECTIVE},
    "EP2, shared expert under transfers": {"ep": 2, "switches": {"moe_alltoall_overlap_comm": True}},
    "EP2, in halves": {"ep": 2, "switches": {"moe_batch_overlap": "on"}},
    "EP2, shared expert on Megatron's stream": {"ep": 2, "overrides": {"moe_shared_expert_overlap": True}},
}
BOTH, INDEXERS = [6, 6, 4], [4, 4, 4]
"""Starts, waits, and products that indexers use: two attentions and a shared expert, two microbatches."""
STARTS: dict[str, list[list[int]]] = {
    "layers recomputed": [[12, 12, 8]],  # recomputed layers start them again
    "EP2": [BOTH] * 2,
    "PP2": [[2, 2, 2], [4, 4, 2]],  # the dense layer is on the first stage
    "CP2": [BOTH] * 2,
    "TP2+SP": [BOTH] * 2,
    "TP2+SP, fused DSA": [BOTH] * 2,
    "TP2+SP, in chunks": [INDEXERS] * 2,
    "TP2+SP x CP2": [BOTH] * 4,
    "EP2, shared expert under transfers": [INDEXERS] * 2,
    "EP2, in halves": [[]] * 2,  # once per attention run, measurements included
    "EP2, shared expert on Megatron's stream": [INDEXERS] * 2,
}
"""Dict from case to counts per rank; the default is :data:`BOTH`."""


@pytest.mark.parametrize("name", [*RUNS, *(pytest.param(each, marks=pytest.mark.full) for each in OTHERS)])
def test_the_same_bits(pool, name):
    arguments = dict({**RUNS, **OTHERS}[name])
    expected = STARTS.get(name, [BOTH])
    switches, ranks = arguments.pop("switches", {}), len(expected)
    one = pool.run(f"{CASES}:step", ranks, switches=switches, **arguments)
    two = pool.run(f"{CASES}:step", ranks, switches={**switches, "two_streams": True}, **arguments)
    assert [rank["starts"] for rank in one] == [[0, 0, 0]] * ranks
    if expected[0]:
        assert [rank["starts"] for rank in two] == expected
    else:
        assert all(len(set(rank["starts"])) == 1 and rank["starts"][0] >= 8 for rank in two)
    for theirs, ours in zip(one, two, strict=True):
        assert len(ours["losses"]) == len(theirs["losses"])
        assert all(map(torch.equal, ours["losses"], theirs["losses"]))
        assert ours["gradients"].keys() == theirs["gradients"].keys()
        for parameter, gradient in theirs["gradients"].items():
            assert torch.equal(ours["gradients"][parameter], gradient), parameter


def test_a_wait_that_is_missing_is_a_race(pool):
    # Each of the four waits is omitted once.
    (found,) = pool.run(f"{CASES}:watched_layer", 1, dropped=[None, 0, 1, 2, 3])
    complete, *others = found
    assert complete["races"] == complete["freed early"] == []
    assert complete["waits"] == 4, "there and back, for the indexer and for the shared expert"
    assert complete["accumulated beside"] == 0, "what reads a weight's gradient finds it on the first stream"
    second, first = False, True
    assert complete["kept"] == [
        *((32, second), (32, first), (16, first), (4, first)),  # hidden states, key and weights
        *((32, second), (32, first)),
    ], "the other stream's use of each tensor that crosses is known to the allocator"
    for number, without in enumerate(others):
        assert without["races"], f"nobody missed wait {number}"


@pytest.mark.full
def test_a_gather_and_its_products_come_in_order_too(pool):
    for found in pool.run(f"{CASES}:watched_layer", 2, dropped=[None, 1], tp=2):
        complete, without = found
        assert complete["races"] == complete["freed early"] == []
        assert complete["waits"] == 4
        assert without["races"]


def test_what_was_swapped_is_there_for_the_stream_that_reads_it(pool):
    """Autograd runs the indexer's backward on the second stream, which must wait for swapped hidden
    states.
    """
    swapped = {"swap_attention": True, "swap_attention_min_bytes": 0}
    ((complete, without),) = pool.run(f"{CASES}:watched_layer", 1, dropped=[None, BACKWARD], switches=swapped)
    assert complete["races"] == complete["freed early"] == []
    assert without["races"], "the second stream waits for the copy"


def test_few_tokens_stay_on_the_first_stream(pool):
    # Two sequences per microbatch.
    tokens = 2 * model.SEQUENCE
    for least, waits in ((tokens, 4), (tokens + 1, 0)):
        ((found,),) = pool.run(f"{CASES}:watched_layer", 1, dropped=[None], tokens=least)
        assert (found["waits"], found["races"]) == (waits, [])


def test_how_many_tokens_are_few_is_the_platforms_unless_it_is_said(monkeypatch):
    platform = OrderedPlatform()
    monkeypatch.setattr(platforms, "_current", platform)
    for name, given, least in (("npu", None, 0), ("cuda", None, 8192), ("cuda", 0, 0), ("npu", 3, 3)):
        monkeypatch.setattr(type(platform), "name", name)
        options = Options.of(SimpleNamespace(two_streams=True, two_streams_min_tokens=given)).streams
        for tokens in {max(0, least - 1), least}:
            assert second_stream.is_worth(options, torch.empty(tokens, 1, 2)) == (tokens >= least), name


def test_one_stream_is_said(caplog, monkeypatch):
    (feature,) = (candidate for candidate in features.built_in() if candidate.name == "two-streams")
    stream_context = context(feature.name, Options.of(None))
    with caplog.at_level(logging.INFO):
        beside.say_how_many(stream_context)
        monkeypatch.setattr(platforms, "_current", OrderedPlatform())
        beside.say_how_many(stream_context)
    assert [record.getMessage() for record in caplog.records] == [
        "--two-streams: cpu has one stream, so everything runs in turns"
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "has neither an indexer nor a shared expert"),
        ({"experimental_attention_variant": "dsa", "moe_shared_expert_overlap": True}, None),
        (
            {"moe_shared_expert_intermediate_size": 8, "moe_shared_expert_overlap": True},
            "runs the shared expert elsewhere",
        ),
        (
            {"moe_shared_expert_intermediate_size": 8, "cuda_graph_impl": "local"},
            "--cuda-graph-impl local: a graph",
        ),
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


@pytest.mark.parametrize(
    ("sizes", "in_turn"),
    [
        ({}, True),
        ({"moe_token_dispatcher_type": "alltoall"}, False),
        ({"sequence_parallel": False}, False),
        ({"tensor_model_parallel_size": 1}, False),
    ],
)
def test_a_shared_expert_runs_in_its_turn_where_it_shares_a_buffer_with_the_dispatcher(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any], in_turn: bool
) -> None:
    config = {"sequence_parallel": True, "tensor_model_parallel_size": 2}
    config |= {"moe_token_dispatcher_type": "allgather", **sizes}
    experts = torch.nn.Linear(2, 2)
    layer = SimpleNamespace(
        use_shared_expert=True,
        shared_expert_overlap=False,
        shared_experts=experts,
        config=SimpleNamespace(**config),
    )
    monkeypatch.setattr(beside, "_is_worth", lambda *_: True)
    started = mock.Mock()
    monkeypatch.setattr(second_stream, "start", started)
    options = SimpleNamespace(streams=SimpleNamespace(shared_elsewhere=None), overlaps_tp=False)
    run = beside.compute_beside(lambda self, states: "in its turn", context("two-streams", options))
    assert (run(layer, torch.ones(2)) == "in its turn") is in_turn
    assert started.called is not in_turn
