"""Split backwards: bit-identical, with weight gradients where the list has them, within the bound."""

from __future__ import annotations

import argparse
from collections import Counter
from functools import partial
from typing import Any
from unittest import mock

import pytest

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.pipeline.split_backward.feature import (
    Options,
    check_split,
    serve_without_transformer_engine,
    split_wanted,
)
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.schedule import beside, lists, megatron_order
from mindspeed_dsa.schedule.events import Costs, Kind
from mindspeed_dsa.schedule.report import figures
from mindspeed_dsa.schedule.simulate import simulate
from tests.features.pipeline.fb_overlap.paired_steps import with_prediction
from tests.support import model
from tests.support.contexts import running
from tests.support.model import losses_of

# -- functions that run in the pool's workers ------------------------------------------------------


def run(
    switches: dict[str, Any],
    layout: dict[str, int],
    frozen: str = "",
    **arguments: Any,
) -> dict[str, Any]:
    """Return a step's result, and the deferred weight gradients.

    Args:
        switches: feature switches.
        layout: parallel sizes.
        frozen: module of each chunk to freeze.
        **arguments: arguments of :func:`model.run`.
    """
    from mindspeed_dsa.features.pipeline import waiting_gradients
    from mindspeed_dsa.features.pipeline.split_backward.playing import Player

    chunks: list[Any] = []
    apart: set[int] = set()
    take = waiting_gradients._taken_out

    def taken(queue: Any) -> Any:
        apart.add(id(queue[0].weight))
        return take(queue)

    def build(*args: Any, **kwargs: Any) -> Any:
        chunks.append(model.freeze(original(*args, **kwargs), frozen))
        return chunks[-1]

    original = with_prediction(model.gpt_model)
    with (
        mock.patch.object(model, "gpt_model", build),
        mock.patch.object(waiting_gradients, "_taken_out", taken),
    ):
        result = model.run(switches, **arguments, **layout)
    context = running("split-backward")
    # Only matrices have weight gradients that can be deferred.
    matrices = {
        name: weight
        for chunk in chunks
        for name, weight in model.global_names(chunk).items()
        if weight.dim() > 1 and weight.requires_grad
    }
    return {
        **result,
        "waited": context.state(Player).most if context else None,
        "at once": [name for name, weight in matrices.items() if id(weight) not in apart],
    }


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 2000}
FUSION = {
    "switches": {"gemm_gradient_accumulation_fusion": True},
    "overrides": {"gradient_accumulation_fusion": True},
}
CASES: dict[str, tuple[int, dict[str, int], int, dict[str, Any]]] = {
    # name: ranks, layout, layers, more arguments
    "PP2": (2, {"pp": 2}, 2, {}),
    "PP2 x VPP2, overlapped reduction": (2, {"pp": 2, "vpp": 2}, 4, {"ddp": OVERLAP}),
    "PP2 x TP2+SP": (4, {"pp": 2, "tp": 2}, 2, {}),
    "PP2, overlapped reduction": (2, {"pp": 2}, 2, {"ddp": OVERLAP}),
    "PP2, into main_grad": (2, {"pp": 2}, 2, FUSION),
    "PP2, into main_grad, overlapped reduction": (2, {"pp": 2}, 2, {**FUSION, "ddp": OVERLAP}),
    "PP2, recomputed": (2, {"pp": 2}, 2, {"overrides": FULL}),
    "PP2, frozen": (2, {"pp": 2}, 2, {"frozen": "embedding"}),
    "PP2, all layers frozen": (2, {"pp": 2}, 2, {"frozen": "decoder", "overrides": model.WITHOUT_EXPERTS}),
    "PP2 x TP2": (4, {"pp": 2, "tp": 2}, 2, {"sequence_parallel": False, "overrides": model.WITHOUT_EXPERTS}),
    "PP2 x EP2": (4, {"pp": 2, "ep": 2}, 2, {}),
    "PP4": (4, {"pp": 4}, 4, {"num_microbatches": 6}),
    "PP4, fewer microbatches than ranks": (4, {"pp": 4}, 4, {"num_microbatches": 2}),
    "PP4, one waits": (4, {"pp": 4}, 4, {"num_microbatches": 6, "bound": 1}),
    "PP4, none waits": (4, {"pp": 4}, 4, {"num_microbatches": 6, "bound": 0}),
}
QUICK = ("PP2 x TP2+SP",)
MARKED = [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in CASES]


@pytest.mark.parametrize("name", MARKED)
def test_the_same_bits_in_the_order_of_the_list(pool, name, tmp_path):
    ranks, layout, layers, more = CASES[name]
    run_step = partial(
        pool.run,
        "tests.features.pipeline.test_split_backward:run",
        ranks,
        layout=layout,
        overrides={
            "num_layers": layers,
            **more.get("overrides", {}),
        },
        num_microbatches=more.get("num_microbatches", 4),
        micro_batch_size=1,
        frozen=more.get("frozen", ""),
        ddp=more.get("ddp"),
        sequence_parallel=more.get("sequence_parallel", True),
    )
    stock = run_step(switches=more.get("switches", {}))
    split = {"split_backward": True, "split_backward_waiting": more.get("bound"), **more.get("switches", {})}
    ours = run_step(switches={**split, "trace_schedule": str(tmp_path), "trace_schedule_step": 1})
    for mine, theirs in zip(ours, stock, strict=True):
        assert losses_of(mine) == losses_of(theirs)
        assert mine["gradients"].keys() == theirs["gradients"].keys()
        different = [
            key for key, gradient in theirs["gradients"].items() if not mine["gradients"][key].equal(gradient)
        ]
        assert different == []
    found = beside.compare(tmp_path, Megatron())
    assert found.other_order == []
    kinds = Counter(span.event.kind for spans in found.recorded.ranks for span in spans)
    assert kinds[Kind.FORWARD] == kinds[Kind.BACKWARD] == kinds[Kind.WEIGHT]
    at_once = [name for rank in ours for name in rank["at once"]]
    # Embeddings and routers compute their weight gradients at once.
    assert [name for name in at_once if "embedding" not in name and "router" not in name] == []
    learning = [rank["waited"] for rank in ours if rank["gradients"]]
    assert all(units > 0 and size > 0 for units, size in learning) or "all layers frozen" in name
    if "bound" in more:
        # the unit that was just deferred, and the units that wait
        assert max(units for units, _ in learning) == 1 + more["bound"]


# -- memory ----------------------------------------------------------------------------------------


def peak(switches: dict[str, Any], layout: dict[str, int], **arguments: Any) -> tuple[int, int]:
    """Return the peak bytes of all tensors in a step, and the bytes counted as deferred."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = run(switches, layout, **arguments)
    most = now = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most, (result["waited"] or (0, 0))[1]


@pytest.mark.full
@pytest.mark.parametrize("bound", [None, 0])
def test_no_more_memory_than_is_counted(pool, bound):
    """Deferred weight gradients raise the peak by no more than their counted bytes."""
    # On the last rank, where one forward is in flight however many weight gradients are deferred.
    arguments: dict[str, Any] = {"layout": {"pp": 2}, "num_microbatches": 4, "overrides": {"num_layers": 2}}
    function = "tests.features.pipeline.test_split_backward:peak"
    stock = pool.run(function, 2, switches={}, **arguments)[-1]
    most, counted = pool.run(
        function, 2, switches={"split_backward": True, "split_backward_waiting": bound}, **arguments
    )[-1]
    assert 0 < most - stock[0] <= counted, (most, stock, counted)


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ()),
        ({"pipeline_model_parallel_size": 1}, ("there is none",)),
        ({"transformer_impl": "transformer_engine"}, ("--transformer-impl local",)),
        ({"overlap_moe_expert_parallel_comm": True}, ("use --moe-fb-overlap",)),
        ({"moe_fb_overlap": True, "overlap_moe_expert_parallel_comm": True}, ()),
        ({"delay_wgrad_compute": True}, ("--delay-wgrad-compute",)),
        ({"defer_embedding_wgrad_compute": True}, ("--defer-embedding-wgrad-compute",)),
        ({"use_megatron_fsdp": True}, ("--use-megatron-fsdp",)),
        ({"fp8": "hybrid"}, ()),
        ({"schedules_method": "dualpipev"}, ("--dualpipev-dw-detach",)),
        ({"num_microbatches_with_partial_activation_checkpoints": 2}, ("partial activation",)),
    ],
)
def test_what_does_not_combine(given, words):
    values = {"pipeline_model_parallel_size": 2, "transformer_impl": "local", **given}
    problems = list(check_split(argparse.Namespace(**values), None))
    assert len(problems) == len(words)
    for problem, word in zip(problems, words, strict=True):
        assert word in problem


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"split_backward_waiting": 1}, "add that"),
        ({"split_backward": True, "split_backward_waiting": -1}, "-1"),
    ],
)
def test_a_bound_that_bounds_nothing_is_refused(given, says):
    with pytest.raises(SettingsError, match=says):
        Options.of(argparse.Namespace(**{"split_backward": False, **given}))


@pytest.mark.parametrize("other", [{}, {"moe_fb_overlap": True, "overlap_moe_expert_parallel_comm": True}])
def test_megatrons_flag_is_served_for_its_own_layers(other):
    args = argparse.Namespace(delay_wgrad_compute=True, transformer_impl="local", **other)
    assert split_wanted(argparse.Namespace(split_backward=False, split_backward_waiting=None, **vars(args)))
    assert len(serve_without_transformer_engine(args)) == 1
    assert not args.delay_wgrad_compute


@pytest.mark.parametrize(
    "other", [{"transformer_impl": "transformer_engine"}, {"overlap_moe_expert_parallel_comm": True}]
)
def test_megatrons_flag_is_left_alone_where_it_means_something_else(other):
    values = {"transformer_impl": "local", "delay_wgrad_compute": True, **other}
    settings = argparse.Namespace(split_backward=False, split_backward_waiting=None, **values)
    assert not split_wanted(settings)
    assert serve_without_transformer_engine(settings) == []
    assert settings.delay_wgrad_compute


# -- the list --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_a_step_is_shorter_and_needs_no_more_memory(ranks, chunks):
    """A split step is shorter by up to 2 (PP - 1) W, without more memory."""
    costs = Costs()
    whole = megatron_order.schedule(Megatron(), ranks, chunks, 2 * ranks)
    steps, peaks = [], []
    for schedule in (whole, *(lists.weights_later(whole, most) for most in (0, 1, None))):
        figures_of_step = figures(simulate(schedule, costs), costs)
        steps.append(figures_of_step.step_time)
        peaks.append(max(figures_of_step.peak_memory))
    assert steps[0] > steps[1] >= steps[2] >= steps[3]
    assert steps[0] - steps[3] == pytest.approx(2 * (ranks - 1))  # 2 (PP - 1) W, as in ZB-H1
    assert peaks == [peaks[0]] * 4
