"""Losses of layers that share a selection: values and gradients equal an oracle in plain PyTorch, in fp64."""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.dsa.feature import check_fused
from mindspeed_dsa.features.dsa.indexer_loss import IndexerLoss, indexer_loss
from mindspeed_dsa.features.dsa.loss import dense_loss
from mindspeed_dsa.features.dsa.operands import Operands
from mindspeed_dsa.features.dsa.problem import IndexInputs, LossOptions, Problem
from mindspeed_dsa.features.dsa.served import log_divisor, served_dense_loss
from mindspeed_dsa.features.dsa.sparse_attention import sparse_attention
from mindspeed_dsa.features.dsa.stages import warmup
from mindspeed_dsa.megatron.dsa import MODELS
from mindspeed_dsa.megatron.selection_source import PLACE, Chosen, Place, Selections, current, recomputing
from mindspeed_dsa.megatron.served_index import Delivery, ServedGradients, ServedIndex, Serving

TOKENS, HEADS, LATENT, ROPE, TOPK = 24, 4, 16, 8, 6
LAYERS = 3
SCALE = 0.3


def operands(seed: int) -> Operands:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query = random(TOKENS, 1, HEADS, LATENT + ROPE).requires_grad_()
    return Operands(query, random(TOKENS, 1, 1, LATENT + ROPE), random(HEADS, 5, LATENT), SCALE)


def index() -> IndexInputs:
    generator = torch.Generator().manual_seed(0)
    # Eight index heads: with few of them, several keys have a score of exactly 0.
    shapes = (1, TOKENS, 8, 8), (1, TOKENS, 8), (1, TOKENS, 8)
    tensors = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return IndexInputs(*(tensor.requires_grad_() for tensor in tensors))


def losses_of_layers(inputs: IndexInputs, topk: int, on_chosen: bool, in_backward: bool, weight: float):
    """Run a layer that selects and the layers that it serves; return their losses after one backward."""
    logged: list[torch.Tensor] = []

    def report(share: torch.Tensor) -> torch.Tensor:
        logged.append(share.detach())
        return torch.ones_like(share)

    loss = LossOptions(weight, on_chosen, in_backward=report if in_backward else None)
    serving = Serving(ServedGradients(), scores=on_chosen)
    layers = [Problem(operands(seed), topk, loss=loss, backend="reference") for seed in range(1, LAYERS + 1)]
    first = sparse_attention(
        Problem(layers[0].operands, topk, loss=loss, backend="reference", serving=serving), inputs
    )
    given = Chosen(first.topk_indices, is_shared=True, index=first.served)
    shared = [
        sparse_attention(Problem(layer.operands, topk, loss=loss, backend="reference", given=given), None)
        for layer in layers[1:]
    ]
    # Backward from the last layer down, as a model's backward runs.
    for result in reversed(shared):
        if result.loss is not None:
            logged.append(result.loss)
        for sums, run, gradients in result.deliveries:
            sums.add(run, gradients)
        result.out.sum().backward()
    total = first.out.sum()
    if first.loss is not None:
        logged.append(first.loss.detach())
        total = total + first.loss
    total.backward()
    return logged


def oracle(inputs: IndexInputs, topk: int, on_chosen: bool):
    """Return the index distribution's logarithm and each layer's target, over the keys of the loss."""
    query, key, weights = inputs.query[0], inputs.key[0], inputs.weights[0]
    scores = (torch.relu(torch.einsum("qhd,kd->qhk", query, key)) * weights[..., None]).sum(1)
    visible = torch.ones(TOKENS, TOKENS).tril().bool()
    scores = scores.masked_fill(~visible, -torch.inf)
    chosen = visible
    if on_chosen:
        best = scores.detach().topk(min(topk, TOKENS)).indices
        chosen = torch.zeros_like(visible).scatter_(1, best, True) & visible
    log_index = scores.masked_fill(~chosen, -torch.inf).log_softmax(-1)
    targets = []
    for seed in range(1, LAYERS + 1):
        layer = operands(seed)
        attention = torch.einsum("qhd,kd->qhk", layer.query[:, 0], layer.key[:, 0, 0]) * SCALE
        heads = attention.detach().masked_fill(~chosen[:, None], -torch.inf).softmax(-1)
        targets.append(heads.sum(1) / HEADS)
    return log_index, targets


def divergence(target: torch.Tensor, log_index: torch.Tensor) -> torch.Tensor:
    """Return the mean over query tokens of KL(target || index)."""
    ratio = target.clamp_min(1e-300).log() - log_index.where(target > 0, 0.0)
    return (target * ratio).where(target > 0, 0.0).sum(-1).mean()


CASES = {
    "selected keys": (TOPK, True, False),
    "selected keys, in backward": (TOPK, True, True),
    "every key is selected": (TOKENS, True, False),
    "all visible keys": (TOPK, False, False),
    "all visible keys, dense attention": (TOKENS, False, False),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_equal_the_oracle(case):
    topk, on_chosen, in_backward = CASES[case]
    ours, theirs = index(), index()
    logged = losses_of_layers(ours, topk, on_chosen, in_backward, 1 / LAYERS)
    log_index, targets = oracle(theirs, topk, on_chosen)
    expected = [divergence(target, log_index) for target in targets]
    torch.testing.assert_close(
        torch.stack([value.detach() for value in reversed(logged)]), torch.stack(expected).detach() / LAYERS
    )
    # The gradient of the mean of divergences is the gradient of the divergence from the mean target.
    divergence(torch.stack(targets).mean(0), log_index).backward()
    for name in ("query", "key", "weights"):
        torch.testing.assert_close(
            getattr(ours, name).grad, getattr(theirs, name).grad, rtol=1e-10, atol=1e-12, msg=name
        )


@pytest.mark.parametrize("per_token", [False, True])
def test_fp16_gradients_of_a_mean_over_many_tokens_are_there_before_the_loss_scale(per_token):
    tokens = 2048
    generator = torch.Generator().manual_seed(0)
    shapes = (tokens, 1, HEADS, LATENT), (tokens, 1, 1, LATENT), (HEADS, 5, LATENT - ROPE)
    query, key, value = (torch.randn(shape, generator=generator).half() for shape in shapes)
    loss = LossOptions(0.01, False, per_token)
    problem = Problem(Operands(query, key, value, SCALE), TOPK, loss=loss, backend="cpu")
    shapes = (1, tokens, 2, 16), (1, tokens, 16), (1, tokens, 2)
    inputs = [torch.randn(shape, generator=generator).half() for shape in shapes]
    _, gradients = served_dense_loss(problem, ServedIndex(tuple(inputs), ServedGradients()))
    exact = [one.double().requires_grad_() for one in inputs]
    wide = Operands(query.double(), key.double(), value.double(), SCALE)
    dense_loss(replace(problem, operands=wide), IndexInputs(*exact)).backward()
    for name, gradient, one in zip(("query", "key", "weights"), gradients, exact, strict=True):
        error = (gradient.double() - one.grad).norm() / one.grad.norm()
        assert error < 2e-3, f"{name}: {error:.1e}"


def test_a_loss_scale_that_fp16_lacks_reaches_served_gradients():
    sums, megatron = ServedGradients(), indexer_loss(Megatron())
    delivery = Delivery(sums, 0, (torch.ones(2, dtype=torch.float16),))
    output, loss = torch.zeros(2, requires_grad=True), torch.zeros((), requires_grad=True)
    with mock.patch.object(IndexerLoss, "gradient", return_value=torch.tensor(2.0**20)):
        megatron.attach(output, loss, 1, [delivery]).sum().backward()
    (total,) = sums.take(0)
    assert total.dtype == torch.float32
    assert total.tolist() == [2.0**20] * 2


def test_bytes_that_the_losses_of_other_layers_keep():
    """A gradient for each layer that shares, in fp64; and the scores, which ``own`` keeps as well.

    A job's bytes are compared with the formula in tests/benchmarks/test_shared_layers.py.
    """
    loss, serving = LossOptions(1.0, True), Serving(ServedGradients(), scores=True)
    problem = Problem(operands(1), TOPK, loss=loss, backend="reference")
    first = sparse_attention(replace(problem, serving=serving), index())
    given = Chosen(first.topk_indices, is_shared=True, index=first.served)
    results = [sparse_attention(replace(problem, given=given), None) for _ in range(LAYERS - 1)]
    scores = 8 * TOPK * TOKENS
    assert sum(one.nbytes for served in first.served for one in served.outputs) == scores
    kept = [one for result in results for one in result.deliveries[0].gradients]
    assert sum(one.nbytes for one in kept) == scores * (LAYERS - 1)
    # A loss that waits for its backward does not hold the scores.
    detached = weakref.ref(first.served[0].outputs[0])
    del first, given
    assert detached() is None


def test_the_sum_is_the_mean_times_the_number_of_layers():
    mean, total = index(), index()
    losses_of_layers(mean, TOPK, True, False, 1 / LAYERS)
    losses_of_layers(total, TOPK, True, False, 1.0)
    torch.testing.assert_close(total.query.grad, mean.query.grad * LAYERS)


def test_a_recomputation_adds_to_the_first_runs_gradients():
    place = Place("layer 3", "layer 3", hands_on=True, is_last=False)
    first = Selections().gradients_for(place)
    with recomputing(None, served=("layer 3", first)):
        assert current().gradients_for(place) is first
        assert current().gradients_for(Place("layer 7", "layer 7")) is not first


def call(place: Place, loss_layers: str = "served") -> SimpleNamespace:
    options = SimpleNamespace(loss_layers=loss_layers, learns_served=loss_layers != "own")
    return SimpleNamespace(layer=SimpleNamespace(**{PLACE: place}, indexer=None), options=options)


def test_the_log_has_a_layers_loss_without_its_weight():
    place = Place("layer 1", "layer 1", served=4)
    assert log_divisor(call(place)) == 1 / 4
    assert log_divisor(call(place, "served-sum")) == log_divisor(call(place, "own")) == 1
    # The layer logs two losses of weight 1/2 each: their mean is their sum.
    repeated = Place("layer 1 of MTP", "layer 1 of MTP", repeats=True, served=2)
    assert log_divisor(call(repeated)) == 1
    assert log_divisor(call(repeated, "served-sum")) == 2
    assert log_divisor(call(repeated, "own")) == 1


def test_a_warm_up_without_the_layer_of_the_indexer_is_an_error():
    sharing = call(Place("layer 4", "layer 3"))
    with recomputing(None), pytest.raises(RuntimeError, match="layer 4 attends to the keys that layer 3"):
        warmup._loss(sharing, None, None, True)
    # Without a loss, as in an evaluation, nothing is handed on.
    with recomputing(None):
        assert warmup._loss(sharing, None, None, False) == (None, ())
        assert warmup._loss(call(Place("layer 4", "layer 3"), "own"), None, None, True) == (None, ())


GLM = SimpleNamespace(
    **MODELS["glm-5.2"],
    num_layers=11,
    use_fused_dsa=True,
    dsa_indexer_loss_layers="served",
    dsa_indexer_loss_coeff=0.01,
)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, None),
        ({"dsa_indexer_topk_freq": 1}, "every layer of this model selects keys"),
        ({"dsa_stage": "frozen"}, "--dsa-stage frozen trains no indexer"),
        ({"dsa_stage": "warmup"}, None),
        ({"dsa_indexer_loss_coeff": 0.0}, "set --dsa-indexer-loss-coeff above 0"),
        ({"use_fused_lightning_indexer": False}, "add --use-fused-dsa"),
    ],
)
def test_jobs_without_such_losses_are_refused(changed, problem):
    problems = [
        text
        for text in check_fused(SimpleNamespace(**{**vars(GLM), **changed}), None)
        if "loss-layers" in text
    ]
    assert len(problems) == (problem is not None)
    assert problem is None or problem in problems[0]
