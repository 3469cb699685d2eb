"""Recomputation behind frozen modules: trainable weights get the same gradients as without it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from mindspeed_dsa.megatron.frozen_inputs import checkpoint_learning, learn_without_output
from tests.matrix import model as tiny
from tests.matrix import steps
from tests.support.model import assert_same_gradients, put_together
from tests.support.releases import FULL_HERE

pytestmark = pytest.mark.releases(">=0.12.1", quick=True)

FUSED = {"use_fused_dsa": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe", "core_attn"]}
OUTPUTS = {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mla_up_proj"]}
MTP = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}


def trained(frozen: Sequence[str], **arguments: Any) -> dict[str, Any]:
    """Train one step; parameters whose names contain one of ``frozen`` are frozen."""
    build = tiny.gpt_model

    def gpt_model(*args: Any, **kwargs: Any) -> Any:
        model = build(*args, **kwargs)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
        return model

    with mock.patch.object(tiny, "gpt_model", gpt_model), transformer_engine():
        return steps.step(**arguments)


def transformer_engine() -> Any:
    """Patch in the Transformer Engine names that ``CheckpointWithoutOutput`` uses, without fp8."""
    from megatron.core.tensor_parallel import random

    return mock.patch.multiple(
        random,
        create=True,
        FP8GlobalStateManager=SimpleNamespace(is_fp8_enabled=lambda: False),
        activation_recompute_forward=lambda **_: nullcontext(),
        fp8_autocast=lambda **_: nullcontext(),
    )


EMBEDDING = ["embedding"]
ALL_BEFORE_CORE = ["embedding", "input_layernorm", "linear_q_", "linear_kv_"]
ALL_BUT_QUERIES = [
    "embedding",
    "input_layernorm",
    "linear_q_down",
    "q_layernorm",
    "linear_kv_",
    "kv_layernorm",
]
ALL_BUT_LAST = ["embedding", "layers.0", "layers.1", "layers.2"]
ALL_BUT_MTP = ["embedding", "decoder", "output_layer"]
PARTS = ("layernorm", "linear_q_", "linear_kv_", "linear_proj", "mlp")
ALL_BUT_INDEXERS = ["embedding", "output_layer", *PARTS]
AHEAD = {"recompute_in_advance": True}


@pytest.mark.parametrize(
    ("frozen", "recompute", "switches", "layout"),
    [
        (EMBEDDING, FULL, {}, {}),
        (EMBEDDING, FULL, FUSED, {"tp": 2}),
        pytest.param(EMBEDDING, BLOCK, FUSED, {"pp": 2}, marks=FULL_HERE),
        pytest.param(ALL_BEFORE_CORE, SELECTIVE, {}, {}, marks=FULL_HERE),
        (EMBEDDING, OUTPUTS, {}, {}),
        pytest.param(ALL_BUT_QUERIES, OUTPUTS, FUSED, {}, marks=FULL_HERE),
        (EMBEDDING, FULL, AHEAD, {"pp": 2}),
        pytest.param(ALL_BUT_LAST, FULL, FUSED, {}, marks=FULL_HERE),
        (ALL_BUT_INDEXERS, FULL, FUSED, {}),
        (ALL_BUT_MTP, {**FULL, **MTP}, FUSED, {}),
    ],
    ids=[
        "stock",
        "TP2",
        "block, PP2",
        "selective",
        "outputs",
        "outputs of queries",
        "ahead",
        "last layer",
        "indexers",
        "MTP",
    ],
)
def test_what_learns_learns_the_same(pool, frozen, recompute, switches, layout):
    def step(switches, overrides):
        ranks = pool.run(
            f"{__name__}:trained",
            2 if layout else 1,
            frozen=frozen,
            switches=switches,
            overrides=overrides,
            num_microbatches=2,
            **layout,
        )
        return {**ranks[-1], "gradients": put_together(ranks)}

    kept = {name: value for name, value in recompute.items() if not name.startswith("recompute")}
    before = step({name: on for name, on in switches.items() if name in FUSED}, kept)
    more = {"mtp_recompute": True} if MTP.keys() <= recompute.keys() else {}
    after = step({**switches, **more}, recompute)
    assert after["losses"] == before["losses"]
    # A frozen layer's indexer loss is not recomputed.
    if any("decoder.layers.0" in name for name in before["gradients"]):
        assert after["indexer loss"] == before["indexer loss"]
    assert_same_gradients(after["gradients"], before["gradients"], rtol=1e-6)


def twice(function, _, *args):
    """Call torch's checkpoint in place of Megatron's, which saves generator states."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=True)


@pytest.mark.parametrize("learns", [True, False])
def test_what_does_not_learn_is_not_computed_again(learns):
    frozen, layer = torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 4).requires_grad_(learns)
    runs = []

    def run(rows, mask):
        runs.append(torch.is_grad_enabled())
        return layer(frozen(rows)), mask

    rows, mask = torch.ones(2, 4), torch.ones(2, dtype=torch.bool)
    output, beside = checkpoint_learning(twice, run, False, rows, mask)
    assert (output.requires_grad, beside.requires_grad) == (learns, False)
    if learns:
        output.sum().backward()
        assert torch.equal(layer.weight.grad, frozen(rows).sum(0).expand(4, 4))
    assert runs == [False, True][: 1 + learns]
    assert not rows.requires_grad


@pytest.mark.parametrize("learns", [True, False])
def test_outputs_that_are_discarded(monkeypatch, learns):
    """Megatron's own class would return outputs that need no gradient and cannot be recomputed."""
    from megatron.core.tensor_parallel import random

    whole = random.CheckpointWithoutOutput.checkpoint
    monkeypatch.setattr(random.CheckpointWithoutOutput, "checkpoint", learn_without_output(whole))
    monkeypatch.setattr(random, "_get_all_rng_states", tuple)
    monkeypatch.setattr(random, "_set_all_rng_states", lambda *_: None)
    monkeypatch.setattr(random, "_fork_rng", nullcontext)
    frozen, layer = torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 4).requires_grad_(learns)
    after = torch.nn.Linear(4, 4)

    def run(rows, more):
        return layer(rows), frozen(more)

    rows = torch.randn(2, 4)
    with transformer_engine():
        checkpoint = random.CheckpointWithoutOutput()
        outputs = checkpoint.checkpoint(run, rows, rows)
        assert outputs[0].requires_grad is learns
        consumed = after(outputs[0]) * after(outputs[1])
        checkpoint.discard_output_and_register_recompute(consumed)
        assert not any(output.untyped_storage().nbytes() for output in outputs)
        consumed.square().sum().backward()
    gradients = [each.grad for each in (*layer.parameters(), *after.parameters())]
    again = after(layer(rows)) * after(frozen(rows))
    weights = [each for each in (*layer.parameters(), *after.parameters()) if each.requires_grad]
    expected = torch.autograd.grad(again.square().sum(), weights)
    assert all(torch.equal(a, b) for a, b in zip(gradients[2 * (not learns) :], expected, strict=True))
    assert gradients[0] is not None if learns else gradients[0] is None
    assert not rows.requires_grad


def test_inputs_that_want_a_gradient_are_left_alone():
    layer = torch.nn.Linear(4, 4)
    inputs = []

    def keep(function, *args):
        inputs.extend(args)
        return function(*args)

    rows, wanting = torch.ones(2, 4), torch.ones(2, 4, requires_grad=True)
    checkpoint_learning(keep, lambda a, b: layer(a + b), rows, wanting)
    with torch.no_grad():
        checkpoint_learning(keep, layer, rows)
    assert [each is rows for each in inputs] == [True, False, True]
