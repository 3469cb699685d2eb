"""Operators in CUDA graphs: static shapes, no synchronisation, and replays that compute with new data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_dsa.ops import checks
from tests.ops import triton_backend
from tests.ops.cuda_graph_cases import CASES, Case
from tests.support.cuda_graphs import Graph, NotCapturable, capture

pytestmark = pytest.mark.skipif(
    triton_backend.DEVICE != "cpu", reason="the stand-in captures in Triton's interpreter"
)

SLOW = {
    ("indexer_kl_loss, sparse and dense", "triton"),
    ("sparse_attention_by_head", "triton"),
    ("sparse_flash_attention, with the loss in its backward", "triton"),
}
"""Cases of full runs: the quick case of the whole operator runs their kernels as well."""


@pytest.fixture(autouse=True)
def as_in_training(poisoned_memory, checked_indices):
    torch.use_deterministic_algorithms(False)
    checks.set_debug_checks(False)


def inputs_of(case: Case, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in case.inputs]


def step(case: Case, backend: str, inputs: list[Tensor]) -> list[Tensor | None]:
    """Return an operator's results and the gradients of its inputs."""
    found = case.run(backend, *inputs)
    results = [one for one in (found if isinstance(found, (list, tuple)) else [found]) if one is not None]
    roots = [one for one in results if one.requires_grad]
    factors = [torch.cos(one.detach()).nan_to_num() for one in roots]
    return [*results, *torch.autograd.grad(roots, inputs, factors, allow_unused=True)]


def captured(case: Case, backend: str) -> tuple[Graph, list[Tensor], list[Tensor | None]]:
    inputs, graph = inputs_of(case, 0), Graph()
    step(case, backend, inputs)  # objects that are made once exist by then
    with capture(graph):
        results = step(case, backend, inputs)
    return graph, inputs, results


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(name, backend, marks=pytest.mark.full if (name, backend) in SLOW else ())
        for name, case in CASES.items()
        for backend in case.backends
    ],
)
def test_a_replay_computes_with_new_data(name, backend):
    case = CASES[name]
    if backend in case.refused:
        with pytest.raises(NotCapturable, match=case.refused[backend]):
            captured(case, backend)
        return
    graph, inputs, results = captured(case, backend)
    for seed in (1, 2):
        new = inputs_of(case, seed)
        expected = step(case, backend, new)
        with torch.no_grad():
            for one, other in zip(inputs, new, strict=True):
                one.copy_(other)
        graph.replay()
        for one, other in zip(results, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=0, atol=0)


def _reads(data: Tensor) -> Any:
    return data * 2 if data.sum() > 0 else data


def _sizes(data: Tensor) -> Any:
    return data[data > 0]


def _uploads(data: Tensor) -> Any:
    return data + torch.tensor([1.0], device=data.device)


def _resizes(data: Tensor) -> Any:
    (data * 2).untyped_storage().resize_(0)


def _draws(data: Tensor) -> Any:
    return torch.rand_like(data)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_reads, "reads the device on the host"),
        (_sizes, "reads the device on the host"),
        (lambda data: data.tolist(), "reads the device on the host"),
        (lambda data: data.cpu(), "reads the device on the host"),
        (_uploads, "copies from the host"),
        (_resizes, "memory changes its size"),
        (_draws, "draws random numbers"),
    ],
)
def test_the_stand_in_refuses(function, reason):
    with pytest.raises(NotCapturable, match=f"{reason}.*test_cuda_graphs.py"), capture(Graph()):
        function(DATA)


DATA = torch.arange(3.0)


def test_a_capture_runs_nothing_and_a_replay_runs_no_python():
    data, total, calls = torch.arange(3.0), torch.zeros(3), []
    graph = Graph()
    with capture(graph):
        calls.append(1)
        doubled = data * 2
        total += doubled
    assert doubled.isnan().all()
    assert total.tolist() == [0, 0, 0]
    for _ in range(2):
        graph.replay()
    assert (doubled.tolist(), total.tolist(), calls) == ([0, 2, 4], [0, 4, 8], [1])
