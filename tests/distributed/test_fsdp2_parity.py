"""The main job with dense weights sharded by FSDP2 is the same training as with DDP in the same layout.

With memory features beside it, and resumed from a checkpoint, it is so to the bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.distributed.parity import EP2, PP2, SHALLOW, TP2, VPP2, ZERO, Bounds, Lab, Layout
from tests.distributed.test_memory_parity import ACTIVATIONS, WITH_SWAP, assert_same_bits
from tests.support.memory_events import EVENTS, GATHERED, GROUPED, STARTED

ON = {"use_torch_fsdp2": True}
EXACT = Bounds(loss=1e-6, grad_norm=1e-6, first_gradient=1e-6, last_gradient=1e-4, update=1e-3)
"""Nothing but the order of sums differs; one sign of an indexer's product near zero may make the last two."""
PER_TOKEN = "--calculate-per-token-loss"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
INSIDE_LAYERS = {
    "recompute_norm": True,
    "recompute_activation_function": True,
    "moe_alltoall_overlap_comm": True,
}
MTP = f"{SHALLOW} --mtp-num-layers 1"
BF16 = f"{SHALLOW} --bf16"
BF16_MTP = f"{MTP} --bf16"
STACKED = "--moe-grouped-gemm"
PAIRS = {"moe_fb_overlap": True}
FOUR = "--micro-batch-size 1"  # microbatches, so that there are pairs


def layout_of(
    name: str, ranks: int, flags: str = "", model: str = SHALLOW, quick: bool = False, **switches: Any
) -> Any:
    layout = Layout(name, ranks, flags, model, switches={"use_fused_dsa": True, **switches})
    return pytest.param(layout, id=name, marks=() if quick else pytest.mark.full)


LAYOUTS = [
    layout_of("DP2, loss per token", 2, PER_TOKEN, quick=True),
    layout_of("TP2+SP x DP2", 4, TP2),
    layout_of("TP2+SP x EP2 x DP2", 4, f"{TP2} {EP2} --expert-tensor-parallel-size 1"),
    layout_of("PP2 x DP2, MTP", 4, PP2, MTP),
    layout_of("EP2, MTP", 2, EP2, MTP),
    layout_of("EP2 x EDP2", 4, EP2),
    layout_of("PP2 x EP2", 4, f"{PP2} {EP2}", quick=True),
    layout_of("PP2 x VPP2 x EP2, loss per token", 4, f"{PP2} {VPP2} {EP2} {PER_TOKEN}"),
    layout_of("EP2, layers recomputed", 2, f"{EP2} {RECOMPUTE}"),
    layout_of("EP2, outputs recomputed, all-to-alls overlapped", 2, EP2, **INSIDE_LAYERS),
    layout_of("CP2 x DP2", 4, "--context-parallel-size 2", context_parallel_size=2),
    layout_of("EP2 x EDP2, grouped experts, MTP", 4, f"{EP2} {STACKED}", MTP, moe_grouped_gemm=True),
    layout_of("PP2 x EP2, grouped experts", 4, f"{PP2} {EP2} {STACKED}", moe_grouped_gemm=True),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_trains_as_with_ddp(lab: Lab, layout: Layout) -> None:
    with_ddp = lab.run(layout)
    outcome = lab.check(with_fsdp2(layout), EXACT, reference=with_ddp)
    assert with_ddp.memory[GATHERED] == 0
    # Five steps of four microbatches, each layer in either direction.
    assert outcome.memory[GATHERED] >= 5 * 4 * 4 * 2
    for counts in (with_ddp.memory, outcome.memory):
        assert (counts[GROUPED] > 0) == (STACKED in layout.flags)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        layout_of("EP2, MTP, four microbatches", 2, f"{EP2} {FOUR}", MTP),
        layout_of("PP2 x VPP2 x EP2, four microbatches", 4, f"{PP2} {VPP2} {EP2} {FOUR} {PER_TOKEN}"),
        layout_of("TP2+SP x EP2 x DP2", 4, f"{TP2} {EP2} {FOUR} --expert-tensor-parallel-size 1"),
    ],
)
def test_pairs_train_as_with_ddp(lab: Lab, layout: Layout) -> None:
    """As plain DDP does in Megatron's usual schedule."""
    with_ddp = lab.run(layout)
    outcome = lab.check(with_fsdp2(layout, **PAIRS), EXACT, reference=with_ddp)
    assert with_ddp.memory[STARTED] == with_ddp.memory[GATHERED] == 0
    assert outcome.memory[STARTED] > 0
    assert outcome.memory[GATHERED] > 0


def with_fsdp2(layout: Layout, **switches: Any) -> Layout:
    return replace(
        layout,
        name=f"{layout.name}, FSDP2",
        flags=f"{layout.flags} --use-torch-fsdp2",
        switches={**layout.switches, **ON, **switches},
    )


# In fp32 an RMSNorm of several operations is recomputed with gradients that are rounded differently.
ON_HOST = {name: value for name, value in WITH_SWAP.items() if name.startswith("swap")}
WITH_VIRTUAL = {**ACTIVATIONS, "virtual_optimizer": ["all"]}


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "switches"),
    [
        (Layout("PP2 x VPP2 x EP2", 4, f"{PP2} {VPP2} {EP2}", BF16), WITH_SWAP),
        (Layout("TP2+SP x DP2, MTP", 4, TP2, BF16_MTP), WITH_VIRTUAL),
        (Layout("PP2 x VPP2 x EP2, pairs", 4, f"{PP2} {VPP2} {EP2} {FOUR}", BF16, switches=PAIRS), WITH_SWAP),
        (Layout("EP2, fp32, grouped experts", 2, f"{EP2} {STACKED}", SHALLOW), ON_HOST),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else "",
)
def test_memory_features_leave_the_bits(lab: Lab, layout: Layout, switches: dict[str, Any]) -> None:
    fused = {"use_fused_dsa": True, "moe_grouped_gemm": STACKED in layout.flags}
    alone, beside = lab.run(with_fsdp2(layout, **fused)), lab.run(with_fsdp2(layout, **fused, **switches))
    assert_same_bits(beside, alone)
    for name, event in EVENTS.items():
        assert alone.memory[event] == 0
        assert (beside.memory[event] > 0) == bool(switches.get(name.replace("-", "_"))), name


@pytest.mark.parametrize(
    ("layout", "switches"),
    [
        (Layout("DP2, fp32", 2, "", SHALLOW), {}),
        pytest.param(
            Layout("PP2 x VPP2 x EP2", 4, f"{PP2} {VPP2} {EP2}", BF16), WITH_SWAP, marks=pytest.mark.full
        ),
        pytest.param(Layout("TP2+SP x DP2", 4, TP2, BF16), {}, marks=pytest.mark.full),
        pytest.param(Layout("EP2 x EDP2, MTP", 4, EP2, BF16_MTP), {}, marks=pytest.mark.full),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else "",
)
def test_a_resumed_run_is_the_unbroken_one(lab: Lab, layout: Layout, switches: dict[str, Any]) -> None:
    (whole, resumed), contents = lab.resume(with_fsdp2(layout, use_fused_dsa=True, **switches), step=3)
    results = [[(each["lm_loss"], each["grad_norm"]) for each in records] for records in (whole, resumed)]
    assert len(results[0]) == 2
    assert results[1] == results[0]
    first, second = contents
    assert any("exp_avg_sq" in name for name in first)
    assert first.keys() == second.keys()
    assert [name for name in first if not first[name].equal(second[name])] == []


@pytest.mark.full
def test_a_run_goes_on_from_the_distributed_optimizer(lab: Lab) -> None:
    fused = {"use_fused_dsa": True}
    layout = Layout("EP2, distributed optimizer", 2, f"{EP2} {ZERO}", BF16, switches=fused)
    into = with_fsdp2(Layout("PP2 x EP2", 4, f"{PP2} {EP2}", BF16, switches=fused))
    (whole, resumed), _ = lab.resume(layout, 3, into)
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=1e-3)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-2)
