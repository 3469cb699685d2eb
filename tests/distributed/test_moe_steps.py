"""Ten steps of the main job with each MoE feature: by itself, with all others, and with other kinds of
features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mindspeed_dsa.runs import expert_load, expert_placement
from mindspeed_dsa.runs.expert_placement import Placement
from tests.distributed.flags import EP2, ETP1, TP2, ZERO
from tests.distributed.parity import HEADING, Lab, Layout, Outcome, assert_same_bits
from tests.distributed.rows import BESIDE_STOCK
from tests.features.moe.balanced_experts.popular_experts import ALWAYS
from tests.support.figures import tell
from tests.support.memory_events import (
    CHUNKED,
    COUNTED,
    EVENTS,
    GROUPED,
    HELD,
    MOVED,
    PERMUTED,
    PLACED,
    STARTED,
)

SMALL = "--num-layers 3"
"""Model size with two layers of experts."""
ORDERS = {2: [0, 2, 1, 3], 3: [3, 0, 1, 2]}
# Two layers of four experts.
EXPERTS = 2 * 4
WHOLE = f"{EP2} {ETP1}"


@dataclass(frozen=True)
class Features:
    """MoE features and the evidence that they ran.

    Attributes:
        switches: feature switches for ``mindspeed_dsa.enable``.
        flags: Megatron flags that the features need.
        events: memory events that occur with these features, and never without them.
        extends: whether the tensor parallel ranks are also the expert parallel ranks.
    """

    switches: Mapping[str, Any] = field(default_factory=dict)
    flags: str = ""
    events: tuple[str, ...] = ()
    extends: bool = False


ON = {
    "moe-alltoall-overlap-comm": Features({"moe_alltoall_overlap_comm": True}, events=(STARTED,)),
    "balanced-moe-experts": Features(ALWAYS, events=(MOVED,)),
    "moe-expert-placement": Features({"moe_expert_placement": "FILE"}, events=(PLACED,)),
    "moe-grouped-gemm": Features({"moe_grouped_gemm": True}, "--moe-grouped-gemm", (GROUPED,)),
    "moe-permute-fusion": Features({"moe_permute_fusion": True}, "--moe-permute-fusion", (PERMUTED,)),
    "moe-tp-extend-ep": Features({"moe_tp_extend_ep": True}, extends=True),
    "moe-router-load-report": Features({"moe_router_load_report": "FOLDER"}, events=(COUNTED,)),
}
ALL = {
    extends: Features(
        {name: value for each in ON.values() if not each.extends for name, value in each.switches.items()}
        | ({"moe_tp_extend_ep": True} if extends else {}),
        " ".join(each.flags for each in ON.values()),
        tuple(event for each in ON.values() for event in each.events),
        extends,
    )
    for extends in (False, True)
}
CASES = {**ON, "all": ALL[False]}
EVENTS_OF_EXPERTS = ALL[False].events
MEMORY = {
    "reuse-fp32-param": {"reuse_fp32_param": True},
    "swap-optimizer": {"swap_optimizer": True, "swap_optimizer_times": 4},
    "virtual-optimizer": {"virtual_optimizer": ["all"]},
    "recompute-activation-function": {"recompute_activation_function": True},
    "recompute-norm": {"recompute_norm": True},
    "swap-attention": {"swap_attention": True, "swap_attention_min_bytes": 0},
}
CHUNKS = {"coc_parallel_num": 2}
Train = Callable[..., Outcome]


@pytest.fixture
def layout(tmp_path: Path) -> Callable[..., Layout]:
    """Return a factory of layouts; placement and load files go to ``tmp_path``."""
    file = tmp_path / "placement.json"
    expert_placement.write(file, Placement(4, 2, ORDERS))

    def with_features(name: str, features: Features, flags: str, model: str = "", **more: Any) -> Layout:
        # FILE and FOLDER stand for paths of this test.
        paths = {"FILE": str(file), "FOLDER": str(tmp_path / f"load of {name}")}
        switches = {key: paths.get(value, value) for key, value in features.switches.items()}
        return Layout(name, 2, f"{flags} {features.flags}", f"{SMALL} {model}", switches={**switches, **more})

    return with_features


def assert_at_work(outcome: Outcome, features: Features, layout: Layout) -> None:
    """Check that exactly these features ran, by their events and report files."""
    for event in EVENTS_OF_EXPERTS:
        assert (outcome.memory[event] > 0) == (event in features.events), event
    assert outcome.memory[HELD] == EXPERTS
    folder = layout.switches.get("moe_router_load_report")
    if folder is not None:
        steps = [record["step"] for record in expert_load.read(Path(folder))]
        assert steps == list(range(1, len(outcome.records) + 1))


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, features in CASES.items() if not features.extends])
def test_alone_and_all_together(ten_steps: Lab, layout: Callable[..., Layout], name: str) -> None:
    """Training equals one process without any of the features."""
    tried = layout(f"ten steps, {name}", CASES[name], f"{EP2} {ZERO}")
    assert_at_work(ten_steps.check(tried), CASES[name], tried)


@pytest.mark.full
def test_over_tensor_parallel_ranks(ten_steps: Lab, layout: Callable[..., Layout]) -> None:
    """Training equals Megatron's TP2, EP2, ETP1 layout without features.

    A comparison with one process would need looser bounds: rounding decides signs of indexer scores, with or
    without our features.
    """
    megatron_layout = Layout("TP2+SP, EP2, ETP1", 2, f"{TP2} {WHOLE} {ZERO}", SMALL)
    stock = ten_steps.run(megatron_layout)
    for name, features in (("moe-tp-extend-ep", ON["moe-tp-extend-ep"]), ("all", ALL[True])):
        tried = layout(f"ten steps, {name}, TP2+SP", features, f"{TP2} {ZERO}")
        outcome = ten_steps.run(tried)
        assert_at_work(outcome, features, tried)
        comparison = ten_steps.compare(tried, outcome, stock)
        tell(HEADING, f"{comparison} (beside the same layout without)")
        assert not comparison.violations(BESIDE_STOCK)
        if name != "all":
            assert_same_bits(outcome, stock)
    # Without the feature, each rank holds a slice of every expert.
    sliced = ten_steps.run(Layout("TP2+SP", 2, f"{TP2} {ZERO}", SMALL))
    assert sliced.memory[HELD] == 2 * EXPERTS


@pytest.fixture(scope="module")
def alone() -> dict[str, Outcome]:
    """Return a cache of runs with MoE features only, the references of several pairs."""
    return {}


@pytest.mark.full
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("name", CASES)
def test_beside_memory_features(
    ten_steps: Lab, layout: Callable[..., Layout], alone: dict[str, Outcome], name: str, memory: str
) -> None:
    """In bf16, a memory feature does not change a bit of the training with a MoE feature."""
    features = CASES[name]
    flags = f"{TP2 if features.extends else EP2} {ZERO}"
    # The run without a memory feature is the reference for all of them.
    if name not in alone:
        alone[name] = ten_steps.run(layout(f"{name}, bf16", features, flags, "--bf16"))
    tried = layout(f"{name}, {memory}", features, flags, "--bf16", **MEMORY[memory])
    on = ten_steps.run(tried)
    assert_same_bits(on, alone[name])
    assert_at_work(on, features, tried)
    for other, event in EVENTS.items():
        assert alone[name].memory[event] == 0
        assert (on.memory[event] > 0) == (other == memory), other


@pytest.mark.full
@pytest.mark.parametrize("name", [*ON, "all"])
def test_beside_chunks(ten_steps: Lab, layout: Callable[..., Layout], name: str) -> None:
    """With TP2, sequence parallelism and full experts, chunks do not change the training."""
    features = {**CASES, "all": ALL[True]}[name]
    flags = TP2 if features.extends else f"{TP2} {WHOLE}"
    without = ten_steps.run(layout(f"{name}, TP2+SP", features, flags))
    tried = layout(f"{name}, TP2+SP in chunks", features, flags, **CHUNKS)
    outcome = ten_steps.run(tried)
    assert without.memory[CHUNKED] == 0
    assert outcome.memory[CHUNKED] > 0
    assert_at_work(outcome, features, tried)
    comparison = ten_steps.compare(tried, outcome, without)
    tell(HEADING, f"{comparison} (beside the same without chunks)")
    assert not comparison.violations(BESIDE_STOCK)
