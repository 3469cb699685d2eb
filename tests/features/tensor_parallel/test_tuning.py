"""The number of chunks is measured once, agreed by all ranks, and measuring does not affect training."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support import contexts
from tests.support.releases import FULL_HERE
from tests.support.stand_in import measures

CASE = "tests.features.tensor_parallel.test_tuning"


class Clock:
    """Clock that advances by the time that fake work claims to take."""

    now = 0.0

    def read(self):
        return self.now


def choose(problems, seconds):
    """Return choices, runs and remembered lengths; work takes ``seconds`` by rank and chunk count."""
    from mindspeed_dsa.features.tensor_parallel.overlap import tuning

    tuner = tuning.Tuning(contexts.context("ascend-coc"))
    choices, runs, clock = [], [], Clock()
    ranks = tuple(range(dist.get_world_size()))

    def work(m):
        def run(chunks):
            runs.append((m, chunks))
            clock.now += seconds[dist.get_rank()][chunks]

        return lambda: run

    with mock.patch.object(time, "perf_counter", clock.read):
        for m in problems:
            problem = tuning.Problem("row forward", True, m, 4, 4, True, torch.float32, "cpu", ranks)
            choices.append(tuner.chunks_for(problem, dist.group.WORLD, work(m)))
    # The problems whose choice is remembered.
    kept = sorted(problem.m for problem in tuner.chosen())
    return choices, runs, kept


@measures
@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ([{1: 1.0, 2: 0.8, 4: 0.7, 8: 0.75}] * 2, 4),
        ([{1: 1.0, 2: 0.99, 4: 0.98, 8: 0.98}] * 2, 1),  # not worth it
        ([{1: 1.0, 2: 1.1, 4: 1.2, 8: 1.3}] * 2, 1),
        # By itself, the first rank would take 8 and the second one 2; the slower of both decides.
        ([{1: 1.0, 2: 0.6, 4: 0.5, 8: 0.4}, {1: 1.0, 2: 0.5, 4: 0.7, 8: 0.9}], 2),
    ],
)
def test_the_slowest_rank_decides_and_nobody_measures_twice(pool, seconds, best):
    for chosen, runs, kept in pool.run(f"{CASE}:choose", 2, problems=[64, 64], seconds=seconds):
        assert chosen == [best, best]
        assert {chunks for _, chunks in runs} == {1, 2, 4, 8}
        # Four counts, each with a few runs.
        assert len(runs) <= 4 * 6
        assert kept == [64]


@measures
def test_lengths_without_end_are_not_measured_without_end(pool):
    seconds = [{1: 1.0, 2: 0.5, 4: 0.6, 8: 0.7}] * 2
    lengths = [*range(100, 140), 100, 139]
    for chosen, runs, kept in pool.run(f"{CASE}:choose", 2, problems=lengths, seconds=seconds):
        assert chosen == [2] * len(lengths)
        # Only the first 16 lengths are measured.
        assert {m for m, _ in runs} == set(range(100, 116))
        assert kept == list(range(100, 116)), "nothing is stored for the others"


def tuned_layers():
    """Return errors and calls of tuned layers, on first and second use, the log, and the tuned problems."""
    import contextlib
    import io

    import mindspeed_dsa
    from tests.features.tensor_parallel.parallel_layers import build, counted, groups, run, tuned

    mindspeed_dsa.enable()
    groups()
    stock = {layer: run(layer) for layer in ("column", "row")}
    mindspeed_dsa.disable()
    mindspeed_dsa.enable(use_ascend_coc=True)
    said = io.StringIO()
    results = {}
    for layer in stock:
        with contextlib.redirect_stderr(said), counted() as first:
            ours = run(layer)
        with contextlib.redirect_stderr(said), counted() as second:
            again = run(layer)
        results[layer] = {
            "errors": [
                float((one[name] - stock[layer][name]).norm() / stock[layer][name].norm())
                for one in (ours, again)
                for name in stock[layer]
            ],
            "calls": [sum(first.values()), sum(second.values())],
        }
    mindspeed_dsa.enable(use_ascend_coc=True)
    module = build("column", torch.float64)
    input = torch.ones(12, 2, module.weight.size(1), dtype=torch.float64, requires_grad=True)
    # Measurements must use no random numbers of the job.
    state = torch.get_rng_state()
    with contextlib.redirect_stderr(io.StringIO()):
        module(input)
    assert torch.get_rng_state().equal(state)
    assert module.weight.grad is None
    assert input.grad is None
    return results, said.getvalue(), [str(problem) for problem in tuned()]


def before_and_after_ddp():
    """Return the problems tuned with gradient accumulation fusion, before and after weights have
    ``main_grad``.
    """
    import mindspeed_dsa
    from tests.features.tensor_parallel.parallel_layers import build, groups, tuned, wgrad_kernels

    mindspeed_dsa.enable(use_ascend_coc=True)
    groups()
    kinds = []
    for layer in ("column", "row"):
        module = build(layer, torch.float32)
        module.gradient_accumulation_fusion = True
        input = torch.ones(12, 2, module.weight.size(1), requires_grad=True)
        for main_grad in (None, torch.zeros_like(module.weight)):
            if main_grad is not None:
                module.weight.main_grad = main_grad
            with wgrad_kernels():
                module(input)
            kinds.append(sorted(problem.kind for problem in tuned()))
        # Measurements of backward must not change the buffer.
        assert not module.weight.main_grad.any()
    return kinds


@FULL_HERE
def test_backward_is_not_tuned_before_there_is_a_main_grad(pool):
    column, row = ["column backward", "column forward"], ["row backward", "row forward"]
    for found in pool.run(f"{CASE}:before_and_after_ddp", 2):
        assert found == [column[1:], column, [*column, row[1]], [*column, *row]]


def said_by_stages(pipeline, data):
    """Return this rank's log of a layer's tuning, with these parallel sizes and TP2."""
    import contextlib
    import io

    import mindspeed_dsa

    mindspeed_dsa.enable(use_ascend_coc=True)
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import RowParallelLinear, model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=pipeline
    )
    assert parallel_state.get_data_parallel_world_size() == data
    model_parallel_cuda_manual_seed(7)
    row = RowParallelLinear(
        8,
        6,
        config=ModelParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True),
        init_method=torch.nn.init.ones_,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=False,
    )
    said = io.StringIO()
    with contextlib.redirect_stderr(said), torch.no_grad():
        # The first use tunes, and logs its choice.
        row(torch.ones(4, 2, 4))
    return said.getvalue().count("row forward")


@pytest.mark.parametrize(
    ("pipeline", "data", "speaking"),
    [pytest.param(2, 1, [1, 0, 1, 0], marks=FULL_HERE), (1, 2, [1, 0, 0, 0])],
)
def test_each_pipeline_stage_says_its_choices_once(pool, pipeline, data, speaking):
    assert pool.run(f"{CASE}:said_by_stages", 4, pipeline=pipeline, data=data) == speaking


def test_tuned_layers(pool):
    ranks = pool.run(f"{CASE}:tuned_layers", 2)
    for found, _, _ in ranks:
        for layer in found.values():
            assert max(layer["errors"]) <= 1e-13
            # The first use includes measurements.
            assert layer["calls"][0] >= 8 + layer["calls"][1]
    said = ranks[0][1]
    for kind in ("column forward", "column backward", "row forward", "row backward"):
        assert said.count(kind) == 1, said
    assert "mindspeed_dsa" not in ranks[1][1]
    assert len(ranks[0][2]) == 2
