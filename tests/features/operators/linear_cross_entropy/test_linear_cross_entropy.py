"""Models train as with complete logits, which are never materialized; refused settings are named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import mindspeed_dsa
from mindspeed_dsa import log
from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.operators.linear_cross_entropy.feature import FEATURE, Options, forms_in_forward
from mindspeed_dsa.features.operators.linear_cross_entropy.postponed_logits import PostponedLogits, _Head
from mindspeed_dsa.ops import backend
from mindspeed_dsa.ops.linear_cross_entropy import backends
from tests.features.memory.recompute_cases import PLAIN
from tests.support import model as job
from tests.support.model import SEQUENCE, assert_same_gradients

# -- functions that run in the pool's workers ------------------------------------------------------

VOCABULARY, ROWS = 512, 8
"""Vocabulary size that gives the logits a unique number of elements, and tokens per chunk."""
OPERATOR = "linear_cross_entropy"


class Sizes(TorchDispatchMode):
    """Records the element counts of all results, in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, Tensor):
                self.seen.add(each.numel())
        return result


@contextmanager
def small_chunks() -> Iterator[None]:
    """Use chunks of :data:`ROWS` tokens, fewer than the operator would choose."""
    with mock.patch.multiple(backends, _FEWEST_ROWS=ROWS), mock.patch.object(backends.Cpu, "CHUNK_BYTES", 0):
        yield


def step(switches: Mapping[str, Any], **arguments: Any) -> dict[str, Any]:
    """Run a training step; also return tensor sizes and calls of our operator."""
    before = backend.calls()
    larger = {"VOCABULARY": VOCABULARY, "ends": partial(job.ends, VOCABULARY)}
    with mock.patch.multiple(job, **larger), small_chunks(), Sizes() as sizes:
        result = job.run(switches, **arguments)
    calls = (backend.calls() - before)[OPERATOR, "cpu"]
    return {**result, "sizes": sizes.seen, "calls": calls}


def without_labels(switches: Mapping[str, Any]) -> Tensor:
    """Return the logits of a model that is called without labels."""
    job.start(switches)
    model = job.gpt_model(job.config())
    tokens = job.samples(2)[:, :-1]
    positions = torch.arange(tokens.size(1)).expand(tokens.size(0), -1)
    with torch.no_grad():
        logits: Tensor = model(tokens, positions, None)
    return logits


def evaluated(switches: Mapping[str, Any]) -> dict[str, Any]:
    """Return the evaluation losses of a model, and calls of our operator."""
    before = backend.calls()
    job.start(switches)
    model = job.gpt_model(job.config()).eval()
    with torch.no_grad():
        losses = job.per_token_loss(model, job.samples(2))
    return {"losses": losses, "calls": (backend.calls() - before)[OPERATOR, "cpu"]}


CASES = "tests.features.operators.linear_cross_entropy.test_linear_cross_entropy"
NAME = "fused-linear-cross-entropy"
ON = {"fused_linear_cross_entropy": True}
TIMES = ("forward", "backward")


def at(gradient):
    return {**ON, "fused_linear_cross_entropy_gradient": gradient}


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [pytest.param(1, {}, marks=pytest.mark.full), pytest.param(2, {"tp": 2}, id="TP2+SP")],
)
@pytest.mark.parametrize("gradient", TIMES)
def test_a_step_has_the_same_gradients_and_no_tensor_as_large_as_the_logits(pool, ranks, layout, gradient):
    asked = {"num_microbatches": 2, **layout}
    stock = pool.baseline(f"{CASES}:step", ranks, switches={}, **asked)
    ours = pool.run(f"{CASES}:step", ranks, switches=at(gradient), **asked)
    for theirs, mine in zip(stock, ours, strict=True):
        losses = [[float(each) for each in side["losses"]] for side in (mine, theirs)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        assert_same_gradients(mine["gradients"], theirs["gradients"], rtol=1e-5)
        assert (theirs["calls"], mine["calls"]) == (0, 2)
        # Elements of all logits of a microbatch, and of a chunk.
        whole, chunk = (tokens * VOCABULARY // ranks for tokens in (4 * SEQUENCE, ROWS))
        assert whole in theirs["sizes"] - mine["sizes"]
        assert chunk in mine["sizes"]


@pytest.mark.parametrize("gradient", TIMES)
def test_gradients_are_added_to_main_grad(pool, gradient):
    step = "tests.features.platform.gradient_fusion.test_gradient_fusion:step"
    asked = {"overrides": PLAIN, "overlap": True}
    (stock,) = pool.run(step, 1, switches={}, fusion=False, **asked)
    switches = {**at(gradient), "gemm_gradient_accumulation_fusion": True}
    (ours,) = pool.run(step, 1, switches=switches, fusion=True, **asked)
    assert_same_gradients(ours["gradients"], stock["gradients"], rtol=1e-5)
    assert ours["gradients"]["output_layer.weight"].any()


def test_logits_that_are_asked_for_and_evaluation(pool):
    (stock,) = pool.run(f"{CASES}:without_labels", 1, switches={})
    (ours,) = pool.run(f"{CASES}:without_labels", 1, switches=ON)
    assert torch.equal(ours, stock)
    (stock,) = pool.run(f"{CASES}:evaluated", 1, switches={})
    (ours,) = pool.run(f"{CASES}:evaluated", 1, switches=ON)
    torch.testing.assert_close(ours["losses"], stock["losses"], rtol=1e-6, atol=0)
    assert (stock["calls"], ours["calls"]) == (0, 1)


# -- postponed logits ----------------------------------------------------------------------------


class Layer(nn.Module):
    """Output layer of one rank, with only the attributes that are read."""

    sequence_parallel = gather_output = gradient_accumulation_fusion = False
    output_size = output_size_per_partition = 11
    tp_group = object()
    config = SimpleNamespace(mtp_num_layers=1)

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(11, 8))
        self.calls = 0

    def forward(self, hidden, weight=None, runtime_gather_output=None):
        self.calls += 1
        return hidden @ (self.weight if weight is None else weight).t(), None


def postponed(layer, hidden):
    alone = SimpleNamespace(copy_to_tensor_model_parallel_region=lambda rows: rows)
    context = Context(NAME, Options("auto"), lambda name: alone, log.get(NAME))
    return _Head(layer, None, context)(hidden)[0]


def test_what_others_read_are_logits():
    layer, hidden = Layer(), torch.randn(5, 2, 8)
    logits = postponed(layer, hidden)
    expected = hidden @ layer.weight.t()
    assert isinstance(logits, PostponedLogits)
    assert layer.calls == 0
    assert logits.size() == expected.size()
    assert (logits * 0.5).size(-1) == 11
    assert torch.equal((logits * 0.5).transpose(0, 1), expected.transpose(0, 1) * 0.5)
    assert torch.equal(torch.argmax(logits, dim=-1), expected.argmax(-1))
    assert torch.equal(torch.softmax(logits, dim=-1), torch.softmax(expected, -1))
    # One computation of logits per use.
    assert layer.calls == 3


def test_the_largest_logits_are_known_with_the_loss():
    # Since Megatron-core 0.19, accuracy of multi-token prediction is counted from the argmax of logits.
    layer, hidden, labels = Layer(), torch.randn(5, 2, 8), torch.randint(11, (2, 5))
    logits = postponed(layer, hidden) * 0.5
    expected = hidden @ layer.weight.t() * 0.5
    loss = logits.loss(labels)
    theirs = nn.functional.cross_entropy(expected.flatten(0, 1), labels.t().flatten(), reduction="none")
    torch.testing.assert_close(loss, theirs.view(5, 2).t())
    assert loss.is_contiguous()
    values, indices = logits.max(dim=-1)
    assert torch.equal(indices, expected.argmax(-1))
    torch.testing.assert_close(values, expected.amax(-1))
    assert torch.equal(torch.argmax(logits, dim=-1), expected.argmax(-1))
    assert layer.calls == 0, "the loss was not computed in place of the layer's forward"
    assert "forward" not in vars(layer)


def test_the_loss_runs_with_the_layers_hooks():
    layer, order = Layer(), []
    layer.register_forward_pre_hook(lambda *_: order.append("before"))
    layer.register_forward_hook(lambda *_: order.append("after"))
    postponed(layer, torch.randn(5, 2, 8)).loss(torch.zeros(2, 5, dtype=torch.int64))
    assert order == ["before", "after"]


# -- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ({"cross_entropy_loss_fusion": True}, "--cross-entropy-loss-fusion"),
        ({"defer_embedding_wgrad_compute": True}, "--defer-embedding-wgrad-compute"),
        ({"config_logger_dir": "somewhere"}, "--config-logger-dir"),
        ({"fp8_output_proj": True}, "--fp8-output-proj"),
        ({"logit_dtype": torch.float32}, "--output-logit-dtype"),
        ({"logits_save_dir": "somewhere"}, "--logits-save-dir"),
        ({"export_kd_teacher_load": "somewhere"}, "--export-kd-teacher-load"),
        ({"hybrid_layer_pattern": "M*"}, "--hybrid-layer-pattern"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
        ({"cuda_graph_impl": "full_iteration"}, "--cuda-graph-impl"),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}, "--cuda-graph-impl"),
        (
            {"cuda_graph_impl": "local", "cuda_graph_scope": [SimpleNamespace(name="full_iteration")]},
            "--cuda-graph-impl",
        ),
    ],
)
def test_what_wants_whole_logits_is_refused_with_both_flags(arguments, flag):
    (problem,) = FEATURE.problems(SimpleNamespace(**at("auto"), **arguments))
    assert "--fused-linear-cross-entropy" in problem
    assert flag in problem
    assert "omit" in problem


def test_arguments_without_a_problem():
    assert not FEATURE.problems(SimpleNamespace(**at("auto"), cuda_graph_impl="local", cuda_graph_scope=[]))
    assert not FEATURE.problems(SimpleNamespace(**at("backward"), cuda_graph_impl="full_iteration"))


@pytest.mark.parametrize(
    ("tokens", "hidden", "number", "expected"),
    [(4096, 3072, 2, True), (4096, 3073, 2, False), (4096, 2048, 4, True), (4096, 7168, 2, False)],
)
def test_auto_keeps_the_gradient_where_it_takes_half_of_the_logits(tokens, hidden, number, expected):
    # bf16 logits are kept with an fp32 copy.
    logits, gradient = tokens * (4 + (number if number < 4 else 0)), hidden * 4
    assert (gradient <= logits / 2) == expected == forms_in_forward("auto", tokens, hidden, number)
    assert forms_in_forward("forward", tokens, hidden, number)
    assert not forms_in_forward("backward", tokens, hidden, number)


def test_switched_off_models_are_stock():
    with mindspeed_dsa.enabled(**ON):
        from megatron.core.models.gpt.gpt_model import GPTModel

        assert "linear_cross_entropy" in GPTModel._postprocess.__code__.co_filename
    assert "linear_cross_entropy" not in GPTModel._postprocess.__code__.co_filename
