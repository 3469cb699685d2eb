"""Every layout is the same training as one process; see ``parity.py`` for what is compared."""

from __future__ import annotations

import pytest

from tests.distributed.parity import (
    EP2,
    FP32,
    HEADING,
    PP2,
    PP4,
    SHALLOW,
    TP2,
    VPP2,
    ZERO,
    Lab,
    Layout,
)
from tests.support.figures import tell
from tests.support.memory_events import GROUPED, PERMUTED, STARTED
from tests.support.observe import Fault

OVERLAPPED = "moe_alltoall_overlap_comm"
LAYOUTS = (
    Layout("TP2+SP", 2, TP2, SHALLOW),
    Layout("PP2", 2, PP2, SHALLOW),
    Layout("PP4 x VPP2, P2P overlap", 4, f"{PP4} {VPP2}"),
    Layout("EP2", 2, EP2, SHALLOW),
    Layout(
        "EP2, fused permutation",
        2,
        f"{EP2} --moe-permute-fusion",
        SHALLOW,
        switches={"moe_permute_fusion": True},
    ),
    Layout("EP2, overlapped all-to-alls", 2, EP2, SHALLOW, switches={OVERLAPPED: True}),
    Layout("DP2, distributed optimizer", 2, ZERO, SHALLOW),
    Layout(
        "EP2, distributed optimizer, grouped experts",
        2,
        f"{EP2} {ZERO} --moe-grouped-gemm",
        SHALLOW,
        switches={"moe_grouped_gemm": True},
    ),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layout_trains_as_one_process(lab: Lab, layout: Layout) -> None:
    outcome = lab.check(layout)
    for event, switch in (
        (STARTED, OVERLAPPED),
        (GROUPED, "moe_grouped_gemm"),
        (PERMUTED, "moe_permute_fusion"),
    ):
        assert (outcome.memory[event] > 0) == (switch in layout.switches), event


def test_the_model_is_what_it_is_meant_to_be(lab: Lab) -> None:
    """Every parameter learns, indexers select, routers route: nothing is equal because it stands still."""
    alone = Layout("one process", model=SHALLOW)
    outcome = lab.one_process(alone)
    assert all(gradient.count_nonzero() for gradient in outcome.first_gradients.values())
    for name in (
        "indexer.k_norm.bias",
        "indexer.linear_wq_b.weight",
        "router.expert_bias",
        "shared_experts.",
    ):
        assert any(name in parameter for parameter in outcome.first_gradients), name
    assert outcome.records[-1]["lm_loss"] < outcome.records[0]["lm_loss"]
    for (kind, layer), chosen in outcome.choices.items():
        if kind == "topk":
            assert chosen.sum(axis=-1).max() == 8, f"layer {layer} does not select"
            assert chosen[:, :, -1].any(axis=(0, 1)).sum() > 16, f"layer {layer} always selects the same"
        else:
            assert (chosen.sum(axis=-1) == 2).all()
            assert chosen.any(axis=(0, 1, 2)).all(), f"layer {layer} has an expert without tokens"


@pytest.mark.parametrize(
    "parameter",
    [
        "layers.3.self_attention.core_attention.indexer.k_norm.bias",
        pytest.param("layers.1.self_attention.linear_kv_up_proj.layer_norm_weight", marks=pytest.mark.full),
        pytest.param("layers.2.mlp.router.weight", marks=pytest.mark.full),
    ],
)
def test_a_wrong_gradient_of_one_small_parameter_is_noticed(lab: Lab, parameter: str) -> None:
    """Two percent in one parameter: neither the loss nor the gradient norm would tell."""
    layout = Layout(f"one process, gradient of {parameter} x 1.02", model=SHALLOW)
    comparison = lab.compare(layout, lab.run(layout, fault=Fault(parameter, 1.02)))
    tell(HEADING, str(comparison))
    assert comparison.loss <= FP32.loss
    assert comparison.grad_norm <= FP32.grad_norm
    noticed = [name for value, name in comparison.first_gradients if value > FP32.first_gradient]
    assert noticed == [f"decoder.{parameter}"]
