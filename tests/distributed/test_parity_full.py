"""Combined layouts, other models, recompute, controls; and proof that a defect does not pass."""

from __future__ import annotations

import numpy as np
import pytest

from tests.distributed.parity import EP2, FP32, HEADING, PP2, PP4, TP2, VPP2, ZERO, Bounds, Lab, Layout
from tests.support.figures import tell

pytestmark = pytest.mark.full

OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
CORE_RECOMPUTE = "--recompute-granularity selective --recompute-modules core_attn"
MTP = "--mtp-num-layers 1"
BF16 = "--bf16"
NO_LOSS = "--dsa-indexer-loss-coeff 0"

LAYOUTS = (
    Layout("TP2+SP x PP2", 4, f"{TP2} {PP2}"),
    Layout("TP2+SP x EP2", 2, f"{TP2} {EP2} --expert-tensor-parallel-size 1"),
    Layout("TP2+SP x DP2, EP2, distributed optimizer", 4, f"{TP2} {EP2} {ZERO}"),
    Layout("EP2 x DP2, distributed optimizer", 4, f"{EP2} {ZERO}"),
    Layout("EP2, allgather dispatcher", 2, f"{EP2} --moe-token-dispatcher-type allgather"),
    Layout("PP2 x VPP2", 2, f"{PP2} {VPP2}"),
    Layout("PP4 x VPP2, no P2P overlap", 4, f"{PP4} {VPP2} --no-overlap-p2p-communication"),
    Layout("PP2 x EP2", 4, f"{PP2} {EP2}"),
    Layout("DP2, overlapped gradients", 2, "--overlap-grad-reduce --ddp-bucket-size 20000"),
    Layout("DP2, distributed optimizer, overlap", 2, f"{ZERO} {OVERLAP}"),
    Layout("PP2 x VPP2 x DP2, distributed optimizer, overlap", 4, f"{PP2} {VPP2} {ZERO} {OVERLAP}"),
    Layout("TP2+SP, core attention recomputed", 2, f"{TP2} {CORE_RECOMPUTE}"),
    Layout("PP2, all layers recomputed", 2, f"{PP2} {FULL_RECOMPUTE}"),
    Layout("MTP: TP2+SP", 2, TP2, model=MTP),
    Layout("MTP: PP2", 2, PP2, model=MTP),
    Layout("MTP: PP4 x VPP2", 4, f"{PP4} {VPP2}", model=MTP),
    Layout("MTP: EP2, distributed optimizer", 2, f"{EP2} {ZERO}", model=MTP),
    Layout("no indexer loss: TP2+SP", 2, TP2, model=NO_LOSS),
    Layout("no indexer loss: DP2, overlap", 2, f"{ZERO} {OVERLAP}", model=NO_LOSS),
    Layout("dense indexer loss: TP2+SP", 2, TP2, model="--no-dsa-indexer-use-sparse-loss"),
    Layout("stock dense GPT: TP2", 2, "--tensor-model-parallel-size 2", stock=True),
    Layout("stock dense GPT: PP2", 2, PP2, stock=True),
    Layout("stock dense GPT: PP2 x VPP2", 2, f"{PP2} {VPP2}", stock=True),
    Layout("stock dense GPT: DP2, distributed optimizer, overlap", 2, f"{ZERO} {OVERLAP}", stock=True),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layout_trains_as_one_process(lab: Lab, layout: Layout) -> None:
    lab.check(layout)


# Sums in another order differ by a part in 256, choices flip, and norm weights, which are close to one, are
# stored in steps as large as what five updates move them: only a missing or doubled gradient shows.
ROUNDED = Bounds(loss=5e-3, grad_norm=2e-2, first_gradient=0.25, last_gradient=0.4, update=0.9)
# Each microbatch is computed as in one process and gradients are added up in fp32: only the norm, and with it
# the clipping, is rounded differently, which may move a weight by one of those steps.
STEPPED = Bounds(last_gradient=ROUNDED.last_gradient, update=ROUNDED.update)


@pytest.mark.parametrize(
    ("layout", "bounds"),
    [
        (Layout("bf16: DP2, distributed optimizer", 2, f"{ZERO} {OVERLAP}", model=BF16), STEPPED),
        (Layout("bf16: PP2, distributed optimizer", 2, f"{PP2} {ZERO}", model=BF16), ROUNDED),
        (Layout("bf16: EP2, distributed optimizer", 2, f"{EP2} {ZERO}", model=BF16), ROUNDED),
        (Layout("bf16: TP2+SP, distributed optimizer", 2, f"{TP2} {ZERO}", model=BF16), ROUNDED),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_bfloat16_trains_as_one_process(lab: Lab, layout: Layout, bounds: Bounds) -> None:
    lab.check(layout, bounds)


@pytest.mark.parametrize(
    "layout",
    [
        Layout("TP2+SP, repair off", 2, TP2, switches={"dsa_indexer_tp_grads": False}),
        Layout("DP2, repair off", 2, switches={"dsa_loss_scale": False}),
    ],
    ids=lambda layout: layout.name,
)
def test_a_defect_of_the_host_does_not_pass(lab: Lab, layout: Layout) -> None:
    """Without its repair each defect spoils every gradient of the indexer and no other."""
    comparison = lab.compare(layout, lab.run(layout))
    tell(HEADING, str(comparison))
    wrong = {name for value, name in comparison.first_gradients if value > FP32.first_gradient}
    assert wrong == {name for _, name in comparison.first_gradients if ".indexer." in name}


def test_forced_choices_are_made_in_every_layout(lab: Lab) -> None:
    """Any choices, here drawn by lot: ties cannot be a reason for a difference."""
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
    """As many choices in each row as the model's own, among visible keys or all experts."""
    draw = generator.random(own.shape)
    if kind == "topk":
        length = own.shape[-1]
        draw[..., ~np.tri(length, dtype=bool)] = 2.0  # future keys come last
    rank = draw.argsort(axis=-1).argsort(axis=-1)
    chosen: np.ndarray = rank < own.sum(axis=-1, keepdims=True)
    return chosen
