"""Layers that FSDP gathers for backward have the losses and gradients of one process, for any trained part.

In the warm-up, below the first trained layer, and with adapters of indexers only, no layer's output requires
a gradient by itself. FSDP hooks the gathering of weights for backward on outputs that do.
"""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.integrations.transformers import apply_dsa
from tests.hosts.transformers.models import FAMILIES, build, tokens
from tests.hosts.transformers.sharded import TRAINED, WRAPPED

pytestmark = pytest.mark.full

CASES = "tests.hosts.transformers.sharded"
KINDS = ["deepseek_v32", "glm_moe_dsa sharing"]


def run(pool, case, **options):
    return pool.run(f"{CASES}:{case}", world_size=2, timeout_s=400, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_losses_and_gradients_are_those_of_one_process(pool, wrapped, kind):
    # A model in use when FSDP1 wraps it has hooks inside the wrapper, like any other module.
    before = [True, False] if wrapped == "layers" else ["FSDP1" in wrapped]
    cases = [
        {"trained": trained, "wrapped": wrapped, "before": first} for trained in TRAINED for first in before
    ]
    assert run(pool, "compare_all", kind=kind, cases=cases) == [{}, {}]


@pytest.mark.parametrize("kind", [name for name in FAMILIES if name not in KINDS])
def test_indexers_of_other_families_learn_in_wrapped_layers(pool, kind):
    """Their layers have other modules behind the attention, and some pass keys on to later layers."""
    parts = ("indexers", "one indexer", "indexers and a layer between")
    cases = [{"trained": trained, "wrapped": "layers"} for trained in parts]
    assert run(pool, "compare_all", kind=kind, cases=cases) == [{}, {}]


def test_the_sparse_stage_trains_both(pool):
    cases = [{"trained": "all", "wrapped": "layers", "stage": "sparse", "before": x} for x in (True, False)]
    for kind in KINDS:
        assert run(pool, "compare_all", kind=kind, cases=cases) == [{}, {}]


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_indexers_learn_for_all_layers_that_they_serve(pool, wrapped):
    case = {"wrapped": wrapped, "before": "FSDP1" in wrapped, "loss_layers": "served"}
    cases = [{"trained": trained, **case} for trained in TRAINED]
    cases.append({"trained": "all", "stage": "sparse", **case})
    if "FSDP1" not in wrapped:
        cases.append({"trained": "indexers", "own_loss": True, **case})
    assert run(pool, "compare_all", kind="glm_moe_dsa serving", cases=cases) == [{}, {}]


def test_the_loss_of_another_layer_gathers_the_indexer_s_weights(pool):
    assert run(pool, "compare_a_reader", kind="glm_moe_dsa serving") == [[], []]


def test_the_indexers_loss_may_go_backward_alone(pool):
    cases = [
        {"trained": trained, "wrapped": wrapped, "own_loss": True}
        for trained in ("indexers", "indexers and a layer between", "all")
        for wrapped in WRAPPED
        if "FSDP1" not in wrapped
    ]
    assert run(pool, "compare_all", kind="deepseek_v32", cases=cases) == [{}, {}]


def test_adapters_of_indexers_beside_frozen_layers(pool):
    pytest.importorskip("peft")
    for kind in KINDS:
        assert run(pool, "compare_adapters", kind=kind) == [[], []]


@pytest.mark.parametrize(
    ("distributed", "bound"),
    [
        ({"fsdp_size": 2}, 1e-4),
        ({"fsdp_size": 2, "ep_size": 2}, 1e-4),
        ({"fsdp_size": 2, "fsdp_mixed_precision": True}, 0.3),
    ],
    ids=str,
)
def test_models_that_transformers_shards(pool, tmp_path, distributed, bound):
    pytest.importorskip("accelerate")
    for kind in KINDS:
        folder = tmp_path / kind.replace(" ", "_")
        build(kind).save_pretrained(folder)
        options = {"kind": kind, "folder": str(folder), "trained": "indexers", "bound": bound}
        assert run(pool, "compare_loaded", **options, **distributed) == [[], []]


def test_mixed_precision_has_the_bits_of_layers_that_stay_gathered(pool):
    assert run(pool, "compare_mixed_precision", kind="deepseek_v32") == [[], []]


def test_layers_are_gathered_and_freed_one_after_the_other(pool):
    """FSDP2 also gathers the next layer's weights ahead, which are not yet waited for."""
    for kind in KINDS:
        assert run(pool, "gathered_at_once", kind=kind) == [[1, 1, 1], [1, 1, 1]]


def test_nothing_of_frozen_layers_is_kept_for_the_backward_of_the_warm_up():
    model = build("deepseek_v32")
    apply_dsa(model, stage="warmup", loss_coeff=1.0)
    frozen = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." in name)
        if ".indexer." not in name:
            frozen[parameter.untyped_storage().data_ptr()] = name
    kept = []

    def keep(tensor):
        kept.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(tokens(), labels=tokens(), use_cache=False)
    assert kept
    assert [frozen[at] for at in kept if at in frozen] == []
    assert not output.logits.requires_grad
    assert output.loss.requires_grad
