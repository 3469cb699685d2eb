"""Converters under TorchTitan's activation checkpointing and `torch.compile`: losses and graphs."""

from __future__ import annotations

from functools import cache

import pytest
import torch

pytest.importorskip("torchtitan.config.override", reason="TorchTitan 0.3: make test-hosts")

from torch.utils.checkpoint import checkpoint

from mindspeed_dsa.integrations.torchtitan import in_graphs
from tests.hosts.torchtitan import jobs

OPTIONS = {"topk": 4, "index_heads": 4, "index_dim": 32, "loss_coeff": 1.0}
ALL = ["npu_dsa", "npu_rms_norm", "npu_permute", "npu_gmm", "npu_rope"]
COMPILER = "aot_eager"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a cached function that runs a job with converters."""
    folder = jobs.files(tmp_path_factory.mktemp("graphs"))

    @cache
    def job(recomputation: str, compiler: str = "", names: tuple[str, ...] = tuple(ALL)) -> jobs.Record:
        options = OPTIONS if "npu_dsa" in names else {}
        converters = {"names": list(names), **options}
        mode = {"TITAN_RECOMPUTATION": recomputation, "TITAN_COMPILER": compiler}
        return jobs.by_config(folder, converters=converters, **mode)

    return job


def assert_same(ours: jobs.Record, theirs: jobs.Record) -> None:
    assert len(theirs.steps) == 4
    assert ours.steps == [pytest.approx(step, rel=1e-5) for step in theirs.steps]
    # The indexer's loss is a difference of two distributions, which are nearly equal here.
    assert ours.indexer_losses == pytest.approx(theirs.indexer_losses, rel=1e-3)
    assert ours.weights == pytest.approx(theirs.weights, rel=1e-4)


@pytest.mark.parametrize("recomputation", ["selective", "full"])
def test_recomputed_layers_have_the_same_losses(run, recomputation):
    whole, ours = run("none"), run(recomputation)
    assert_same(ours, whole)
    assert ours.calls["deepseek_sparse_attention"] == 2 * whole.calls["deepseek_sparse_attention"]


@pytest.mark.parametrize("recomputation", ["none", "selective", "full", "memory_budget"])
def test_a_compiled_layer_is_one_graph_without_a_break(run, recomputation):
    """TorchTitan compiles with `fullgraph`, so that a break would end the job."""
    ours = run(recomputation, COMPILER)
    (part,) = ours.parts
    # One graph of the layer without experts and one of those with experts; the loss is another.
    assert part["graphs"] == 3
    assert part["breaks"] == 0
    assert_same(ours, run("none"))
    # The last norm is outside of the layers. In them, norms and rotations are operations of the graph.
    nodes = {"deepseek_sparse_attention", "permute", "unpermute", "grouped_matmul"}
    assert set(ours.calls) == nodes | {"rms_norm"}


@pytest.mark.full
@pytest.mark.parametrize("name", ALL)
def test_each_converter_alone_in_a_compiled_layer(run, name):
    ours = run("selective", COMPILER, names=(name,))
    assert ours.parts[0]["breaks"] == 0
    assert_same(ours, run("selective", names=(name,)))


# -- nodes -------------------------------------------------------------------------------------


def function(static: str, x: torch.Tensor, weight: torch.Tensor, addend: torch.Tensor | None):
    product = (x @ weight).relu() * float(static)
    if addend is not None:
        product = product + addend
    return product, (product.detach() > 0).int(), product.square().sum()


def shapes(static: str, x: torch.Tensor, weight: torch.Tensor, addend: torch.Tensor | None):
    product = x.new_empty(len(x), weight.shape[1])
    return product, product.new_empty(product.shape, dtype=torch.int32), x.new_empty(())


class Layer(torch.nn.Module):
    def __init__(self, adds: bool) -> None:
        super().__init__()
        self.linear, self.adds = torch.nn.Linear(8, 8), adds
        self.weight = torch.nn.Parameter(torch.randn(8, 8))
        self.addend = torch.nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        arguments = ("3", self.linear(x).sin(), self.weight, self.addend if self.adds else None)
        if torch.compiler.is_compiling():
            product, positive, square = in_graphs.call_in_graph("test", *arguments)
        else:
            product, positive, square = function(*arguments)
        return (product * positive).cos().sum() + 0.1 * square


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_node_has_the_gradients_of_its_function(is_checkpointed, adds):
    in_graphs.node("test", function, shapes)
    torch.manual_seed(0)
    layer, x = Layer(adds), torch.randn(5, 8)

    def recomputed(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False)

    def gradients(forward) -> list[torch.Tensor | None]:
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        forward(leaf).backward()
        return [leaf.grad, *(parameter.grad for parameter in layer.parameters())]

    expected = gradients(layer)
    torch._dynamo.reset()
    compiled = torch.compile(recomputed if is_checkpointed else layer, backend="aot_eager", fullgraph=True)
    for found, wanted in zip(gradients(compiled), expected, strict=True):
        assert (found is None) == (wanted is None)
        assert wanted is None or torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)
    # Without gradients nothing is held, and nothing is held after backward.
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))
    assert not [x for x in in_graphs._numbered.values() if isinstance(x, in_graphs._Graph)]
    del in_graphs._nodes["test"]
