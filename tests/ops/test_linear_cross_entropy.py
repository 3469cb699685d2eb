"""Linear cross entropy equals its formula, for all chunkings, vocabulary splits and token weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_dsa.ops.linear_cross_entropy import backends, linear_cross_entropy
from tests.support import model

TOKENS, VOCABULARY, HIDDEN, ROWS = 37, 101, 16, 8
TOLERANCE = {torch.float64: 1e-14, torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
RUNS = [("cpu", "forward"), ("cpu", "backward"), ("reference", "forward")]
# Accelerator backends consist of PyTorch operations, so they run on CPUs too.
ELSEWHERE = [(name, gradient) for name in ("cuda", "npu") for gradient in ("forward", "backward")]


def problem(dtype=torch.float32, tokens=TOKENS):
    hidden = torch.randn(tokens, HIDDEN).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (tokens,))


def by_formula(hidden, weight, labels, grad, scale=1.0):
    leaves = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    losses = F.cross_entropy(leaves[0] @ leaves[1].t() * scale, labels, reduction="none")
    return losses.detach(), *torch.autograd.grad(losses, leaves, grad.double())


def assert_near(found, expected, dtype):
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() <= TOLERANCE[dtype] * other.norm()


def weights_of_tokens(kind):
    """Return the gradients of the losses, and the token weights passed to the operator."""
    mask = (torch.rand(TOKENS) > 0.3).float()
    return {
        "all alike": (torch.full((TOKENS,), 0.01), None),
        "masked": (mask * 0.01, mask),
        "masked, unknown": (mask * 0.01, None),
        # A wrong expectation, as multi-token prediction shifts the mask; it costs time, not accuracy.
        "shifted mask": (mask.roll(-1) * 0.01, mask),
        "any": (torch.randn(TOKENS), None),
        "none": (torch.zeros(TOKENS), torch.zeros(TOKENS)),
    }[kind]


@pytest.mark.parametrize(
    ("name", "gradient", "dtype"),
    [(*run, dtype) for run in RUNS for dtype in TOLERANCE] + [(*run, torch.float32) for run in ELSEWHERE],
    ids=str,
)
def test_losses_and_gradients_are_the_formulas(name, gradient, dtype):
    for kind in ("all alike", "masked", "masked, unknown", "shifted mask", "any", "none"):
        inputs = problem(dtype)
        grad, told = weights_of_tokens(kind)
        result = linear_cross_entropy(
            *inputs,
            token_weights=told,
            logit_scale=0.5,
            gradient=gradient,
            wants_top=True,
            rows=ROWS,
            backend=name,
        )
        gradients = torch.autograd.grad(result.loss, inputs[:2], grad.to(result.loss.dtype))
        assert [each.dtype for each in gradients] == [dtype, dtype]
        expected = by_formula(*inputs, grad, 0.5)
        assert_near((result.loss.detach(), *gradients), expected, dtype)
        logits = (inputs[0] @ inputs[1].t()).to(result.top.dtype) * 0.5
        assert torch.equal(result.top_index, logits.argmax(-1))
        torch.testing.assert_close(result.top, logits.amax(-1))


@pytest.mark.parametrize(("told", "again"), [(True, 0), (False, 11)])
def test_logits_are_computed_twice_for_tokens_that_count_otherwise_alone(monkeypatch, told, again):
    hidden, weight, labels = problem()
    mask = torch.ones(TOKENS)
    # The first 11 tokens have no loss.
    mask[:11] = 0
    result = linear_cross_entropy(hidden, weight, labels, token_weights=mask if told else None, backend="cpu")
    rows = []
    original = backends._scaled
    monkeypatch.setattr(
        backends,
        "_scaled",
        lambda call, room, logits: (rows.append(len(logits)), original(call, room, logits))[1],
    )
    # Tokens whose loss gradient was not expected are recomputed: none if the mask is known, else all 11.
    (result.loss * mask).mean().backward()
    assert sum(rows) == again


class _Largest(TorchDispatchMode):
    """Records the element count of the largest result of any operation."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return result


@pytest.mark.parametrize("gradient", ["forward", "backward"])
def test_no_tensor_is_as_large_as_the_logits(gradient):
    tokens, vocabulary = 1024, 4096
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight = torch.randn(vocabulary, HIDDEN, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,))
    with _Largest() as ours:
        loss = linear_cross_entropy(hidden, weight, labels, gradient=gradient, rows=128).loss
        loss.mean().backward()
    with _Largest() as stock:
        F.cross_entropy(hidden @ weight.t(), labels).backward()
    assert stock.numbers == tokens * vocabulary
    # 128 of 1024 tokens at a time.
    assert ours.numbers == tokens * vocabulary // 8


@pytest.mark.parametrize("gradient", ["forward", "backward"])
def test_backward_runs_twice_and_for_one_operand(gradient):
    hidden, weight, labels = problem()
    loss = linear_cross_entropy(hidden, weight, labels, gradient=gradient, rows=ROWS).loss.mean()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    for frozen in range(2):
        leaves = [
            each.detach().requires_grad_(number != frozen) for number, each in enumerate((hidden, weight))
        ]
        linear_cross_entropy(*leaves, labels, gradient=gradient, rows=ROWS).loss.mean().backward()
        assert leaves[frozen].grad is None
        torch.testing.assert_close(leaves[1 - frozen].grad, first[1 - frozen], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("gradient", ["forward", "backward"])
@pytest.mark.parametrize("backend", ["cpu", "cuda", "npu"])
@pytest.mark.parametrize(
    ("one_label", "channel", "factor"),
    [(True, 1, 1), (False, 30, 1), (True, 3000, 1), (False, 1, 1e-8), (False, 1, 1e5), (True, 30, 1e5)],
)
def test_no_sum_over_tokens_in_fp16_overflows(backend, gradient, one_label, channel, factor):
    # Token weights are the expected loss gradient up to a factor, by which backward divides.
    tokens = 600
    hidden, weight = torch.rand(tokens, HIDDEN) + 0.5, torch.randn(VOCABULARY, HIDDEN)
    # The weight's channel is zero, so the large channel does not reach the logits.
    hidden[:, 3], weight[:, 3] = channel, 0
    leaves = [each.half().requires_grad_() for each in (hidden, weight)]
    labels = torch.full((tokens,), 7) if one_label else torch.randint(VOCABULARY, (tokens,))
    grad, told = torch.full((tokens,), 1 / tokens), torch.full((tokens,), factor)
    loss = linear_cross_entropy(*leaves, labels, token_weights=told, gradient=gradient, backend=backend).loss
    found = torch.autograd.grad(loss, leaves, grad)
    assert_near(found, by_formula(*leaves, labels, grad)[1:], torch.float16)


class _Sum:
    """fp32 buffer that accumulates a gradient."""

    def __init__(self, start):
        self.total = start.clone()
        self.results = 0

    def target(self):
        return self.total

    def result(self):
        self.results += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gradient", ["forward", "backward"])
def test_an_accumulator_gets_the_gradient_in_place_of_autograd(gradient, dtype):
    inputs = problem(dtype)
    start = torch.randn(VOCABULARY, HIDDEN) * 1e-3
    accumulator = _Sum(start)
    grad, mask = weights_of_tokens("shifted mask")
    result = linear_cross_entropy(
        *inputs, token_weights=mask, gradient=gradient, accumulator=accumulator, rows=ROWS
    )
    result.loss.backward(grad)
    assert inputs[1].grad is None
    assert accumulator.results == 1
    assert_near((accumulator.total - start,), (by_formula(*inputs, grad)[2],), dtype)


def test_a_label_of_nobody_and_numbers_that_are_none():
    hidden, weight, labels = problem()
    # Labels outside of the vocabulary have no target logit.
    labels[3], labels[5] = -100, VOCABULARY
    with torch.no_grad():
        hidden[7] = math.nan
    sides = [
        linear_cross_entropy(hidden, weight, labels, rows=ROWS, backend=name) for name in ("cpu", "reference")
    ]
    gradients = [torch.autograd.grad(side.loss.sum(), (hidden, weight)) for side in sides]
    torch.testing.assert_close(sides[0].loss, sides[1].loss, equal_nan=True)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
    logits = hidden @ weight.t()
    # Their loss is then only the log-sum-exp, relative to the maximum.
    expected = (logits - logits.amax(-1, keepdim=True)).exp().sum(-1).log()
    torch.testing.assert_close(sides[0].loss[[3, 5]], expected[[3, 5]])
    assert sides[0].loss.isnan().nonzero().tolist() == [[7]]


def test_without_a_token_there_is_nothing():
    hidden, weight, labels = problem(tokens=0)
    found = linear_cross_entropy(hidden, weight, labels)
    found.loss.sum().backward()
    assert found.loss.shape == (0,)
    assert not weight.grad.any()


def beside_megatron(inputs: list[Tensor], gradient: Any) -> dict[str, list[Tensor]]:
    """Return a rank's losses and gradients: ours, the reference's, and Megatron's.

    Args:
        inputs: hidden states, weight, labels and loss mask of all ranks.
        gradient: pass in which the weight gradient is formed, ``"forward"`` or ``"backward"``.
    """
    model.start(tp=2)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    hidden, weight, labels, mask = inputs
    # Each rank has half of the vocabulary.
    group = parallel_state.get_tensor_model_parallel_group()
    part = weight.chunk(2)[dist.get_rank(group)]

    def found(losses: Any) -> list[Tensor]:
        leaves = [hidden.clone().requires_grad_(), part.clone().requires_grad_()]
        loss = losses(*leaves)
        gradients = torch.autograd.grad((loss * mask).mean(), leaves)
        # The gradient of the hidden states is a sum over vocabulary parts.
        dist.all_reduce(gradients[0], group=group)
        return [loss.detach(), *gradients]

    def ours(backend: str) -> Any:
        return lambda hidden, weight: (
            linear_cross_entropy(
                hidden,
                weight,
                labels,
                token_weights=mask,
                group=group,
                gradient=gradient,
                rows=8,
                backend=backend,
            ).loss
        )

    def theirs(hidden: Tensor, weight: Tensor) -> Tensor:
        losses: Tensor = vocab_parallel_cross_entropy((hidden @ weight.t())[:, None], labels[:, None])
        return losses[:, 0]

    return {
        "ours": found(ours("cpu")),
        "reference": found(ours("reference")),
        "megatron's": found(theirs),
    }


@pytest.mark.parametrize("gradient", ["forward", "backward"])
def test_ranks_that_share_the_vocabulary(pool, gradient):
    hidden, weight, labels = problem()
    # An even vocabulary, and one label outside of it.
    weight = weight[:100].detach()
    labels = labels.clamp(max=99)
    labels[3] = 1000
    mask = (torch.rand(TOKENS) > 0.3).float()
    for results in pool.run(
        f"{__name__}:beside_megatron",
        2,
        inputs=[hidden.detach(), weight, labels, mask],
        gradient=gradient,
    ):
        for one, other in zip(results["ours"], results["megatron's"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
        for one, other in zip(results["reference"], results["megatron's"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.ones(2, 3, 4)}, "hidden must be"),
        ({"weight": torch.ones(5, 3)}, r"weight must be \[vocabulary, 4\]"),
        ({"weight": torch.ones(0, 4)}, "the vocabulary is empty"),
        ({"weight": torch.ones(5, 4).double()}, "convert one of them"),
        ({"labels": torch.ones(3, dtype=torch.int64)}, r"labels must be \[2\]"),
        ({"labels": torch.ones(2, dtype=torch.int32)}, "labels must be int64"),
        ({"token_weights": torch.ones(3)}, r"token_weights must be \[2\]"),
        ({"gradient": "later"}, "gradient must be one of forward, backward"),
    ],
)
def test_bad_input_is_refused_by_name(change, message):
    inputs = {"hidden": torch.ones(2, 4), "weight": torch.ones(5, 4), "labels": torch.ones(2).long()}
    with pytest.raises(ValueError, match=f"linear_cross_entropy: .*{message}"):
        linear_cross_entropy(**{**inputs, **change})
