"""Pairs with deferred weight gradients: in the list's order, bit-identical to pairs without them.

Interleaved pairs defer all weight gradients. DualPipeV defers them in unpaired backwards that other ranks
wait for.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.schedule import beside, lists
from mindspeed_dsa.schedule.events import Kind
from tests.support.model import losses_of

LAYERS = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EXPERTS = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
MODULES = {
    "recompute_granularity": "selective",
    "recompute_modules": ["core_attn", "mla_up_proj", "mlp", "shared_experts", "layernorm"],
}
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 2000}
PREDICTION = {"mtp_num_layers": 1}
GROUPED = {"moe_grouped_gemm": True}
OUTPUTS = {"recompute_norm": True, "recompute_activation_function": True}
CASES: dict[str, dict[str, Any]] = {
    "experts one by one": {},
    "overlapped reduction": {"ddp": OVERLAP},
    "overlapped reduction, MTP": {"ddp": OVERLAP, "overrides": PREDICTION},
    "into main_grad": {
        "switches": {"gemm_gradient_accumulation_fusion": True},
        "overrides": {"gradient_accumulation_fusion": True},
    },
    "no shared expert": {"overrides": {"moe_shared_expert_intermediate_size": None}},
    "grouped experts": {"switches": GROUPED, "overrides": GROUPED},
    "layers recomputed, MTP": {"overrides": {**LAYERS, **PREDICTION}},
    "experts recomputed": {"overrides": EXPERTS},
    "modules recomputed": {"switches": {"recompute_verify": True}, "overrides": MODULES},
    "outputs recomputed": {"switches": OUTPUTS},
    "layers recomputed in bubbles": {"switches": {"recompute_in_bubble": True}, "overrides": LAYERS},
    "none waits for long": {"bound": 0},
}
SCHEDULES = {
    "interleaved": ({}, {"split_backward": True}, 4),
    "DualPipeV": ({"schedules_method": "dualpipev"}, {"dualpipev_dw_detach": True}, 5),
}
"""Dict from a schedule to switches of pairs, switches that defer gradients, and microbatches."""
ONLY_INTERLEAVED = ("layers recomputed in bubbles", "none waits for long")


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        (schedule, name)
        for schedule in SCHEDULES
        for name in CASES
        if schedule == "interleaved" or name not in ONLY_INTERLEAVED
    ],
)
def test_the_same_bits_in_the_order_of_the_list(pool, tmp_path, schedule, name):
    case, (pair_switches, waits, microbatches) = CASES[name], SCHEDULES[schedule]
    pair_switches = {"moe_fb_overlap": True, **pair_switches, **case.get("switches", {})}

    def run(**switches):
        return pool.run(
            "tests.features.pipeline.test_split_backward:run",
            4,
            switches={**pair_switches, **switches},
            layout={"pp": 2, "vpp": 2, "ep": 2, "etp": 1},
            overrides={"num_layers": 4, **case.get("overrides", {})},
            num_microbatches=microbatches,
            micro_batch_size=1,
            ddp=case.get("ddp"),
        )

    whole = run()
    if "bound" in case:
        waits = {**waits, "split_backward_waiting": case["bound"]}
    split = run(**waits, trace_schedule=str(tmp_path), trace_schedule_step=1)
    for ours, theirs in zip(split, whole, strict=True):
        assert losses_of(ours) == losses_of(theirs)
        assert ours["gradients"].keys() == theirs["gradients"].keys()
        different = [
            key for key, gradient in theirs["gradients"].items() if not ours["gradients"][key].equal(gradient)
        ]
        assert different == []
        # Each matrix, experts included, was deferred in some microbatch.
        assert [name for name in ours["at once"] if "embedding" not in name and "router" not in name] == []
        assert theirs["at once"]
    comparison = beside.compare(tmp_path, Megatron())
    assert comparison.other_order == []
    kinds = Counter(
        (span.event.kind, span.event.pair is not None)
        for spans in comparison.recorded.ranks
        for span in spans
    )
    assert kinds[Kind.FORWARD, True] == kinds[Kind.BACKWARD, True] > 0
    if schedule == "interleaved":
        assert kinds[Kind.WEIGHT, False] == 2 * 2 * microbatches  # ranks x chunks x microbatches
        assert comparison.simulated.schedule.name == "interleaved 1F1B, paired, +1 warmup, split"
    else:
        listed = lists.dual_pipe_v(2, microbatches, split=True)
        assert comparison.recorded.schedule.ranks == listed.ranks
        assert kinds[Kind.WEIGHT, False] == 5
    if "bound" in case:
        # the unit that was just deferred, and the units that wait
        assert max(units for units, _ in (rank["waited"] for rank in split)) == 1 + case["bound"]


@pytest.mark.full
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_layers_that_are_recomputed_behind_a_frozen_embedding(pool, schedule):
    pair_switches, _, microbatches = SCHEDULES[schedule]

    def run(**overrides):
        return pool.run(
            "tests.features.pipeline.test_split_backward:run",
            4,
            switches={"moe_fb_overlap": True, **pair_switches},
            layout={"pp": 2, "vpp": 2, "ep": 2, "etp": 1},
            overrides={"num_layers": 4, **overrides},
            frozen="embedding",
            num_microbatches=microbatches,
            micro_batch_size=1,
        )

    for ours, theirs in zip(run(**LAYERS), run(), strict=True):
        assert losses_of(ours) == losses_of(theirs)
        assert ours["gradients"].keys() == theirs["gradients"].keys() != set()
        assert all(each.equal(theirs["gradients"][name]) for name, each in ours["gradients"].items())
