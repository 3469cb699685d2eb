"""Every layout of the registry trains as its reference does; ``parity.py`` defines the comparison.

Other tests here show that the model would reveal a defect, and cover comparisons that no row can express.
"""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_dsa import features
from tests.distributed.flags import DUALPIPEV, EP2, ETP1, PACK, PACKED, PACKS, SHALLOW, TP2, V
from tests.distributed.layouts import COMBINATIONS, PACKS_ALONE, ROWS
from tests.distributed.parity import FP32, HEADING, STEPS, Lab, Layout, Outcome, assert_same_bits
from tests.distributed.rows import Row
from tests.support.figures import tell
from tests.support.memory_events import CAUSES, HANDED_ON
from tests.support.observe import Fault

CASES = [pytest.param(row, id=row.layout.name, marks=() if row.quick else pytest.mark.full) for row in ROWS]


@pytest.mark.parametrize("row", CASES)
def test_layout_trains_as_its_reference(lab: Lab, ten_steps: Lab, row: Row) -> None:
    runs = {STEPS: lab, 10: ten_steps}[row.steps]
    reference = runs.reference(row.reference) if row.reference else runs.one_process(row.layout)
    outcome = runs.check(row.layout, row.bounds, reference)
    assert_at_work(outcome, row.layout, row)
    assert_at_work(reference, row.reference, row)


def assert_at_work(outcome: Outcome, layout: Layout | None, row: Row) -> None:
    """Check that a watched event occurred if and only if a switch of the layout causes it."""
    switches = layout.switches if layout else {}
    for event, least in row.watched.items():
        if any(switches.get(cause) for cause in CAUSES[event]):
            assert outcome.memory[event] >= least, event
        else:
            assert outcome.memory[event] == 0, event


def test_rows_are_found_by_the_name_of_a_feature() -> None:
    names = [row.layout.name for row in ROWS]
    assert len(set(names)) == len(names)
    known = {feature.name for feature in features.shipped()} | COMBINATIONS.keys()
    assert {row.feature for row in ROWS} <= known


# -- the measure itself ------------------------------------------------------------------------


def test_the_model_is_what_it_is_meant_to_be(lab: Lab) -> None:
    # Every parameter learns, indexers select and routers route: equality is not trivial.
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
    for (kind, layer), choices in outcome.choices.items():
        if kind == "topk":
            assert choices.sum(axis=-1).max() == 8, f"layer {layer} does not select"
            assert choices[:, :, -1].any(axis=(0, 1)).sum() > 16, f"layer {layer} always selects the same"
        else:
            assert (choices.sum(axis=-1) == 2).all()
            assert choices.any(axis=(0, 1, 2)).all(), f"layer {layer} has an expert without tokens"


@pytest.mark.parametrize(
    "parameter",
    [
        "layers.3.self_attention.core_attention.indexer.k_norm.bias",
        pytest.param("layers.1.self_attention.linear_kv_up_proj.layer_norm_weight", marks=pytest.mark.full),
        pytest.param("layers.2.mlp.router.weight", marks=pytest.mark.full),
    ],
)
def test_a_wrong_gradient_of_one_small_parameter_is_noticed(lab: Lab, parameter: str) -> None:
    """An error of 2 % in one parameter's gradient is found, although loss and global norm are in bounds."""
    layout = Layout(f"one process, gradient of {parameter} x 1.02", model=SHALLOW)
    comparison = lab.compare(layout, lab.run(layout, fault=Fault(parameter, 1.02)))
    tell(HEADING, str(comparison))
    assert comparison.loss <= FP32.loss
    assert comparison.grad_norm <= FP32.grad_norm
    noticed = [name for value, name in comparison.first_gradients if value > FP32.first_gradient]
    assert noticed == [f"decoder.{parameter}"]


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        Layout("TP2+SP, repair off", 2, TP2, switches={"no_dsa_repairs": "indexer-tp-grads"}),
        Layout("DP2, repair off", 2, switches={"no_dsa_repairs": "loss-scale"}),
    ],
    ids=lambda layout: layout.name,
)
def test_a_defect_of_the_host_does_not_pass(lab: Lab, layout: Layout) -> None:
    """Each defect of the host spoils all gradients of the indexer, and no others, unless it is repaired."""
    comparison = lab.compare(layout, lab.run(layout))
    tell(HEADING, str(comparison))
    wrong = {name for value, name in comparison.first_gradients if value > FP32.first_gradient}
    assert wrong == {name for _, name in comparison.first_gradients if ".indexer." in name}


@pytest.mark.full
def test_forced_choices_are_made_in_every_layout(lab: Lab) -> None:
    """With random forced choices, one process and TP2 agree, so ties cannot cause the difference."""
    alone, layout = Layout("one process, choices by lot"), Layout("TP2+SP, choices by lot", 2, TP2)
    generator = np.random.default_rng(0)
    forced = {key: by_lot(key[0], own, generator) for key, own in lab.one_process(alone).choices.items()}
    reference = lab.run(alone, forced=forced)
    comparison = lab.compare(layout, lab.run(layout, forced=forced), reference)
    tell(HEADING, str(comparison))
    assert all(np.array_equal(reference.choices[key], forced[key]) for key in forced)
    assert {count for count, _ in comparison.flips.values()} == {0}
    assert not comparison.violations(FP32)
    assert lab.compare(alone, reference).violations(FP32), "the choices made no difference"


def by_lot(kind: str, own: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return random choices, as many per token as in ``own``, among the visible keys or among all experts."""
    draw = generator.random(own.shape)
    if kind == "topk":
        length = own.shape[-1]
        draw[..., ~np.tri(length, dtype=bool)] = 2.0  # future keys come last
    rank = draw.argsort(axis=-1).argsort(axis=-1)
    chosen: np.ndarray = rank < own.sum(axis=-1, keepdims=True)
    return chosen


# -- comparisons that no row can express -------------------------------------------------------


@pytest.mark.full
def test_moe_tp_extend_ep_is_megatrons_own_layout_without_expert_tensor_parallelism(lab: Lab) -> None:
    """``moe_tp_extend_ep`` is bit-identical to Megatron's EP2, ETP1; sliced experts round differently."""
    megatron_layout = lab.run(Layout("TP2+SP, EP2, ETP1", 2, f"{TP2} {EP2} {ETP1}"))
    switches = {"moe_tp_extend_ep": True}
    extended = lab.run(Layout("TP2+SP, experts over its ranks", 2, TP2, switches=switches))
    sliced = lab.run(Layout("TP2+SP", 2, TP2))
    assert all(extended.weights[name].equal(weight) for name, weight in megatron_layout.weights.items())
    assert not all(extended.weights[name].equal(weight) for name, weight in sliced.weights.items())


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_dualpipev_has_the_bits_of_1f1b(lab: Lab, ranks: int) -> None:
    """Gradients are bit-identical to 1F1B, because they are added in the same order; the norm is not."""
    flags = f"--pipeline-model-parallel-size {ranks} --micro-batch-size 1 --clip-grad 0"
    model = SHALLOW if ranks == 2 else ""
    by_1f1b = lab.run(Layout("1F1B", ranks, flags, model))
    in_v = lab.run(Layout("DualPipeV", ranks, f"{flags} {DUALPIPEV}", model, switches=V))
    assert_same_bits(in_v, by_1f1b, norm=False)
    assert in_v.memory[HANDED_ON]


@pytest.mark.full
def test_pack_documents_is_other_training(lab: Lab) -> None:
    """Packed documents give another loss than documents that attend to each other."""
    whole_flags = PACK.replace("--pack-documents", "")
    switches = {name: value for name, value in PACKED.items() if name != "pack_documents"}
    whole = lab.run(Layout("whole", 1, whole_flags, PACKS, switches=switches))
    packed = lab.reference(PACKS_ALONE)
    losses = [[record["lm_loss"] for record in outcome.records] for outcome in (packed, whole)]
    assert losses[0] != losses[1]
