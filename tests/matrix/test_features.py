"""Each feature trains as stock does in each of its layouts, on the installed release.

``make test-matrix`` records the results (``record.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from mindspeed_dsa import session
from mindspeed_dsa.patches import versions
from mindspeed_dsa.runs import collectives, expert_placement
from mindspeed_dsa.runs.expert_placement import Placement
from mindspeed_dsa.tools.hang.waits import find
from tests.features.compilation.regions import compiled_steps as regions
from tests.features.diagnostics.collectives import late_ranks
from tests.features.moe.balanced_experts import popular_experts as balanced
from tests.features.moe.batch_overlap import layer_in_halves as batch_overlap
from tests.matrix.record import Note
from tests.matrix.steps import TWO_AND_MTP
from tests.support import memory_events as events
from tests.support.model import assert_same_gradients, put_together

pytestmark = pytest.mark.releases(">=0.12.1")

STEPS = "tests.matrix.steps"
LAYOUTS: dict[str, dict[str, int]] = {
    "one process": {},
    "TP2+SP": {"tp": 2},
    "PP2": {"pp": 2},
    "PP2 x VPP2": {"pp": 2, "vpp": 2},
    "PP2 x VPP2, four microbatches": {"pp": 2, "vpp": 2, "num_microbatches": 4},
    "EP2": {"ep": 2, "etp": 1},
    "PP2 x VPP2 x EP2": {"pp": 2, "vpp": 2, "ep": 2, "etp": 1},
    "TP2+SP, EP2 over its ranks": {"tp": 2, "ep": 2, "etp": 1},
    "CP2": {"cp": 2},
}
DENSE = "tests.features.attention.context_parallel.dense_model"
DSA = {"experimental_attention_variant": "dsa"}  # so that older releases know the tests' configuration
FUSED = {"use_fused_dsa": True}
CP2 = {**FUSED, "context_parallel_size": 2}
GATHERED = {"cp_comm_type": "allgather"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ORDERS = {2: [3, 0, 1, 2], 4: [2, 1, 0, 3]}


@dataclass(frozen=True)
class Case:
    """A feature in a layout.

    Attributes:
        feature: name of the feature.
        layout: key of :data:`LAYOUTS`.
        switches: arguments of ``mindspeed_dsa.enable``.
        event: counter that only the feature increments.
        overrides: configuration overrides on both sides.
        megatrons: Megatron's own switch, set in the configuration together with the feature.
        rtol: tolerance of gradients, relative to the largest entry; 0 requires equal bits.
        name: layout's name in the record, if it is another.
    """

    feature: str
    layout: str
    switches: Mapping[str, Any]
    event: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    megatrons: Mapping[str, Any] = field(default_factory=dict)
    rtol: float = 0.0
    name: str = ""

    def __str__(self) -> str:
        return f"{self.feature}, {self.name or self.layout}"


PERMUTED = {"moe_permute_fusion": True}
TWO_LAYERS = {"num_layers": 2, "moe_layer_freq": [0, 1]}
FORM = "by head" if Version(str(versions.of_megatron())) < Version("0.19") else "in absorbed form"
REGIONS = {f"prolog of latent attention {FORM}"}
RMS_NORM = {"normalization": "RMSNorm"}
SWITCHED = (
    Case("dsa-absorb", "TP2+SP", {"use_dsa_absorb": True}, rtol=1e-4),
    Case("fused-dsa", "TP2+SP", FUSED, rtol=1e-4),
    Case("fused-dsa", "PP2 x VPP2", FUSED, rtol=1e-4),
    Case("dsa-kernel-backend", "TP2+SP", FUSED, rtol=1e-4),
    Case("dsa-kernel-backend", "PP2 x VPP2", FUSED, rtol=1e-4),
    Case("ascend-coc", "TP2+SP", {"coc_parallel_num": 2}, events.CHUNKED, rtol=1e-5),
    Case("moe-alltoall-overlap-comm", "EP2", {"moe_alltoall_overlap_comm": True}, events.STARTED, rtol=1e-5),
    Case("balanced-moe-experts", "EP2", balanced.ALWAYS, events.MOVED, rtol=1e-5),
    Case("moe-batch-overlap", "EP2", batch_overlap.ALWAYS, events.STARTED, rtol=1e-5),
    Case(
        "moe-batch-overlap",
        "EP2",
        batch_overlap.ATTENTION,
        events.ATTENDED,
        rtol=1e-5,
        name="EP2, attention in halves",
    ),
    Case("moe-expert-placement", "EP2", {"moe_expert_placement": "FILE"}, events.PLACED, rtol=1e-5),
    Case("moe-permute-fusion", "EP2", PERMUTED, events.PERMUTED, megatrons=PERMUTED, rtol=1e-5),
    Case(
        "fused-rmsnorm", "TP2+SP", {"fused_operators": ["rmsnorm"]}, "operator rms_norm", RMS_NORM, rtol=1e-5
    ),
    Case(
        "fused-rotary-pos-emb",
        "TP2+SP",
        {"fused_operators": ["rotary-pos-emb"]},
        "operator rotary",
        rtol=1e-5,
    ),
    Case("fused-swiglu", "TP2+SP", {"fused_operators": ["swiglu"]}, "operator swiglu", rtol=1e-5),
    Case(
        "mask-arithmetic",
        "TP2+SP",
        {"fused_operators": ["mask-arithmetic"]},
        events.FUSED_OPERATORS["mask-arithmetic"],
    ),
    *(
        Case(
            "fused-linear-cross-entropy",
            layout,
            {"fused_linear_cross_entropy": True, "fused_linear_cross_entropy_gradient": gradient},
            "operator linear_cross_entropy",
            overrides,
            rtol=1e-5,
        )
        for layout, gradient, overrides in (
            ("TP2+SP", "forward", {}),
            ("TP2+SP", "backward", {}),
            ("PP2 x VPP2", "auto", {}),
            ("TP2+SP", "auto", TWO_AND_MTP),
        )
    ),
    Case("two-streams", "EP2", {"two_streams": True}, events.BESIDE),
    Case("compile-regions", "one process", {"compile_regions": True}, "compiled", TWO_LAYERS, rtol=1e-5),
    Case("ascend-mc2", "TP2+SP", {"use_ascend_mc2": True}),  # its operators are torch_npu's
    Case("recompute-ahead", "PP2 x VPP2", {"recompute_in_bubble": True}, "ahead", overrides=FULL),
    Case("split-backward", "PP2 x VPP2", {"split_backward": True}, events.WAITED),
    *(
        Case(
            "dualpipev",
            "PP2 x VPP2, four microbatches",
            {"schedules_method": "dualpipev", **switches},
            events.HANDED_ON,
            name=f"PP2{name}",
        )
        for name, switches in (("", {}), (", weight gradients later", {"dualpipev_dw_detach": True}))
    ),
    Case("moe-router-load-report", "EP2", {"moe_router_load_report": "FOLDER"}, events.COUNTED),
    Case("initial-weights", "EP2", {"initial_weights_dir": "FOLDER"}, "files"),
    Case("schedule-trace", "PP2 x VPP2", {"trace_schedule": "FOLDER", "trace_schedule_step": 1}, "files"),
)


MOVED_ELSEWHERE = ("moe-expert-placement", "dualpipev")
"""Features that move experts or layers to other ranks."""


def run(pool: Any, layout: str, **arguments: Any) -> list[dict[str, Any]]:
    """Return each rank's result; equal runs are made only once."""
    sizes = {"num_microbatches": 2, "micro_batch_size": 2, **LAYOUTS[layout], **arguments}
    if layout == "EP2":
        sizes["num_microbatches"] = 1  # two ranks share the batch of one
    if "x EP2" in layout:
        sizes["num_microbatches"] = 4  # pairs of them, on each rank
    ranks = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1)
    if sizes.get("ep", 1) > 1 and sizes.get("tp", 1) == 1:
        ranks *= sizes["ep"]
    found: list[dict[str, Any]] = pool.baseline(f"{STEPS}:step", ranks, **sizes)
    return found


@pytest.mark.parametrize("case", SWITCHED, ids=str)
def test_the_step_without(pool: Any, note: Note, tmp_path: Path, case: Case) -> None:
    """The reference is Megatron's own step, or the backport's for DSA on old releases."""
    paths = {"FILE": str(tmp_path / "placement.json"), "FOLDER": str(tmp_path / "written")}
    switches = {name: paths.get(str(value), value) for name, value in case.switches.items()}
    if note.begins(case.name or case.layout, case.feature, switches=switches):
        return
    expert_placement.write(tmp_path / "placement.json", Placement(4, 2, ORDERS))
    theirs = run(pool, case.layout, overrides=case.overrides)
    ours = run(pool, case.layout, switches=switches, overrides={**case.overrides, **case.megatrons})
    assert_same(ours, theirs, case.rtol, anywhere=case.feature in MOVED_ELSEWHERE)
    assert happened(case, ours, tmp_path)
    assert not happened(case, theirs, tmp_path / "nothing")
    note.trained(ours)


def assert_same(
    ours: Sequence[Any], theirs: Sequence[Any], rtol: float = 0.0, anywhere: bool = False
) -> None:
    """Compare losses and gradients of every rank, or of experts on whichever rank they are."""
    for having, without in zip(ours, theirs, strict=True):
        assert having["losses"] == pytest.approx(without["losses"], rel=rtol / 10, abs=0)
    sides = [[rank["gradients"] for rank in ranks] for ranks in (ours, theirs)]
    if anywhere:
        sides = [[together(ranks)] for ranks in (ours, theirs)]
    for having, without in zip(*sides, strict=True):
        assert having.keys() == without.keys()
        if rtol:
            assert_same_gradients(having, without, rtol)
        else:
            assert not [name for name, gradient in without.items() if not having[name].equal(gradient)]


def together(ranks: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Merge the gradients of the experts of all ranks and of replicated parameters."""
    return {name: gradient for rank in ranks for name, gradient in rank["gradients"].items()}


def happened(case: Case, ranks: Sequence[Any], folder: Path) -> bool:
    """Return whether the feature did its work."""
    if case.event == "files":
        return all(list(folder.glob(f"written/*{rank:05d}.json")) for rank in range(len(ranks)))
    if case.event == "ahead":
        return any(rank["ahead"] for rank in ranks)
    if case.event == "compiled":
        return all(set(rank["compiled"]) >= REGIONS for rank in ranks)
    if case.event:
        return any(rank["counts"].get(case.event, 0) for rank in ranks)
    attention = ranks[0]["counts"].get("operator sparse_flash_attention", 0)
    return case.feature in ranks[0]["at work"] and (attention > 0 or case.switches != FUSED)


CORE_ATTENTION = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}


@pytest.mark.releases(">=0.17")
@pytest.mark.parametrize(
    ("overrides", "passes"), [({}, 1), (CORE_ATTENTION, 1), (FULL, 2)], ids=["plain", "core_attn", "full"]
)
@pytest.mark.parametrize("fused", [{}, FUSED], ids=["Megatron's attention", "fused"])
def test_both_parts_of_two_streams(
    pool: Any, note: Note, fused: Mapping[str, Any], overrides: Mapping[str, Any], passes: int
) -> None:
    note.begins("one process", "two-streams")
    theirs = run(pool, "one process", switches=fused, overrides=overrides)
    ours = run(pool, "one process", switches={**fused, "two_streams": True}, overrides=overrides)
    assert_same(ours, theirs)
    attentions, shared_experts, microbatches = 4, 2, 2
    starts = passes * microbatches * (attentions + shared_experts)
    assert [[rank["counts"][each] for each in (events.BESIDE, events.AWAITED)] for rank in ours] == [
        [starts, starts]
    ]
    assert [rank["counts"].get(events.BESIDE, 0) for rank in theirs] == [0]
    note.trained(ours)


UP_PROJECTIONS = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
WHOLE = {"prolog of latent attention in absorbed form"}
IN_PARTS = {
    "prolog of latent attention, latents",
    "prolog of latent attention in absorbed form, heads",
}


@pytest.mark.releases(">=0.19")
@pytest.mark.parametrize(
    ("layout", "switches", "overrides", "prolog"),
    [
        ("TP2+SP", {}, {}, IN_PARTS),
        ("one process", FUSED, {**FULL, **regions.ROUTING}, WHOLE),
        ("one process", {"recompute_modules": ["mla_up_proj"]}, UP_PROJECTIONS, IN_PARTS),
    ],
    ids=["TP2+SP", "fused, recomputed, balanced", "recomputed up-projections"],
)
def test_compiled_regions_of_absorbed_attention(
    pool: Any,
    note: Note,
    layout: str,
    switches: Mapping[str, Any],
    overrides: Mapping[str, Any],
    prolog: set[str],
) -> None:
    note.begins(layout, "compile-regions")
    overrides = {**TWO_LAYERS, **overrides}
    theirs = run(pool, layout, switches=switches, overrides=overrides)
    ours = run(pool, layout, switches={**switches, "compile_regions": True}, overrides=overrides)
    assert_same(ours, theirs, rtol=1e-5)
    for rank in ours:
        assert set(rank["compiled"]) == prolog
    note.trained(ours)


@pytest.mark.releases(">=0.16")
def test_compiled_regions_of_attention_by_head(pool: Any, note: Note) -> None:
    """Dense models have this form on every release."""
    note.begins("one process", "compile-regions")
    (theirs,) = pool.baseline(f"{DENSE}:step", 1, attention="latent")
    (ours,) = pool.run(f"{STEPS}:compiled_latent_attention", 1)
    torch.testing.assert_close(ours["losses"], theirs["losses"], rtol=1e-6, atol=0)
    assert_same_gradients(ours["gradients"], theirs["gradients"], rtol=1e-5)
    assert ours["compiled"] == ["prolog of latent attention by head"]
    note.trained([ours])


def test_layers_of_multi_token_prediction_report_losses_of_their_own(pool: Any, note: Note) -> None:
    note.begins("one process", "dsa-repairs")
    (result,) = pool.run(f"{STEPS}:reported_losses", 1)
    assert len(result["losses"]) == 4
    assert all(loss > 0 for loss in result["losses"])
    note.trained([result])


@pytest.mark.parametrize("layout", ["TP2+SP", "PP2 x VPP2", "EP2"])
def test_dsa_as_in_one_process(pool: Any, note: Note, layout: str) -> None:
    """Features that are on by default with DSA match one process."""
    _, on = session.resolve(DSA, ())
    note.begins(layout, *(feature.name for feature in on))
    (alone,) = run(pool, "one process")
    ranks = run(pool, layout)
    gradients = put_together(ranks) if layout != "EP2" else together(ranks)
    if layout == "EP2":
        assert sum(rank["losses"][0] for rank in ranks) / 2 == pytest.approx(sum(alone["losses"]) / 2, 1e-5)
    else:
        assert ranks[-1]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert ranks[0]["indexer loss"] == pytest.approx(alone["indexer loss"], rel=1e-4)
    assert_same_gradients(gradients, alone["gradients"])
    note.trained(ranks)


@pytest.mark.parametrize(
    ("feature", "switches"),
    [
        ("dsa-context-parallel", CP2),
        ("cp-block-rows", {**CP2, "cp_block_rows": 2}),
        pytest.param(
            "dsa-repairs",
            {"context_parallel_size": 2},
            marks=pytest.mark.releases(">=0.19,<0.21"),
        ),
    ],
    ids=["rows", "blocks", "Megatron's own"],
)
def test_dsa_on_context_parallel_ranks(
    pool: Any, note: Note, feature: str, switches: Mapping[str, Any]
) -> None:
    if note.begins("CP2", feature, switches=switches):
        return
    (alone,) = run(pool, "one process")
    ranks = run(pool, "CP2", switches=switches, overrides=GATHERED)
    for rank in ranks:
        assert_same_gradients(rank["gradients"], alone["gradients"])
        assert rank["indexer loss"] == pytest.approx(alone["indexer loss"], rel=1e-4)
    note.trained(ranks)


@pytest.mark.releases(">=0.16,<0.19")
def test_a_vocabulary_divided_among_context_parallel_ranks(pool: Any, note: Note) -> None:
    switches = {**CP2, "cp_shard_vocabulary": True, "fused_linear_cross_entropy": True}
    if note.begins("CP2", "cp-shard-vocabulary", switches=switches):
        return
    (alone,) = run(pool, "one process")
    ranks = run(pool, "CP2", switches=switches, overrides=GATHERED)
    vocabulary = {
        name: torch.cat([rank["gradients"][name] for rank in ranks])
        for name in ("embedding.word_embeddings.weight", "output_layer.weight")
    }
    for rank in ranks:
        assert_same_gradients({**rank["gradients"], **vocabulary}, alone["gradients"])
    note.trained(ranks)


@pytest.mark.parametrize("field", ["dsa_indexer_rope_first", "dsa_indexer_normalised_query"])
@pytest.mark.releases(">=0.12.1,<0.19")
def test_deepseeks_layout(pool: Any, note: Note, field: str) -> None:
    switches = {field: True}
    if note.begins("one process", "dsa-model", switches=switches):
        return
    (plain,) = run(pool, "one process")
    (other,) = run(pool, "one process", switches=switches)
    assert other["indexer loss"] != pytest.approx(plain["indexer loss"], rel=1e-3)
    note.trained([other])


def test_the_warmup_stage_trains_indexers_alone(pool: Any, note: Note) -> None:
    if note.begins("one process", "dsa-warmup", switches={"dsa_stage": "warmup"}):
        return
    (result,) = pool.run(f"{STEPS}:indexer_learns", 1, steps=4)
    assert result["losses"][-1] < 0.9 * result["losses"][0]
    assert len(result["trained"]) == 4 * 5
    assert all(".indexer." in name for name in result["trained"])
    note.trained([result])


@pytest.mark.parametrize(
    ("layout", "sizes", "ahead", "experts"),
    # Gathers before the first layer begins: embedding and final norm if present, its own, two more units.
    [
        ("DP2", {}, [5, 5], False),
        ("PP2 x EP2", {"pp": 2, "ep": 2}, [3, 3, 4, 4], False),
        # Plus the experts of the layer that has them.
        ("EP2 x EDP2, experts sharded", {"ep": 2}, [6, 6, 6, 6], True),
    ],
)
def test_weights_that_fsdp2_shards(
    pool: Any, note: Note, layout: str, sizes: Mapping[str, int], ahead: Sequence[int], experts: bool
) -> None:
    switches = {"use_torch_fsdp2": True, "fsdp2_prefetch": 2, "fsdp2_shard_experts": experts}
    if note.begins(layout, "fsdp2", switches=switches):
        return
    ranks = len(ahead)
    theirs = pool.run(f"{STEPS}:train_sharded", ranks, **sizes)
    ours = pool.run(f"{STEPS}:train_sharded", ranks, switches=switches, **sizes)
    for having, without in zip(ours, theirs, strict=True):
        assert_same_gradients(having["gradients"], without["gradients"], rtol=1e-5)
        for step, other in zip(having["records"], without["records"], strict=True):
            assert step["losses"] == pytest.approx(other["losses"], rel=1e-6)
            assert step["norm"] == pytest.approx(other["norm"], rel=1e-6)
        assert having["sharded"] > without["sharded"] == 0
        assert having["counts"][events.GATHERED] > 0
        assert (having["counts"][events.EXPERTS_GATHERED] > 0) == experts
        assert events.GATHERED not in without["counts"]
    assert [rank["gathered ahead"] for rank in ours] == ahead
    note.trained(ours)


def test_a_hang(pool: Any, note: Note, tmp_path: Path) -> None:
    """The record names a rank that is late for its group's first message."""
    switches = {"record_collectives": str(tmp_path)}
    if note.begins("PP2", "record-collectives", switches=switches):
        return
    step, sizes = "tests.matrix.model:one_step", {"num_microbatches": 2, "micro_batch_size": 2, "pp": 2}
    late = {"case": f"{late_ranks.__name__}:train", "folder": str(tmp_path), "kind": "PP", "what": ""}
    theirs = pool.run(f"{STEPS}:beside", 2, case=step, **sizes)
    ours = pool.run(f"{STEPS}:beside", 2, **late, step=step, **sizes)
    assert_same(*([rank["found"] for rank in ranks] for ranks in (ours, theirs)))
    # On a busy machine the records are from two moments: the waiting rank may be in another group by then.
    waits = find(collectives.read(tmp_path)).waits
    assert waits[0].group.kinds == ("PP",)
    assert {wait.missing for wait in waits} == {(late_ranks.LATE,)}
    note.trained(ours)


def test_tensor_parallel_ranks_with_whole_experts(pool: Any, note: Note) -> None:
    note.begins("TP2+SP", "moe-tp-extend-ep")
    theirs = run(pool, "TP2+SP, EP2 over its ranks")
    ours = pool.run(f"{STEPS}:extended", 2, num_microbatches=2, micro_batch_size=2)
    assert_same(ours, theirs)
    for rank in ours:
        assert rank["counts"][events.HELD] == 2 * 2  # layers, experts
    note.trained(ours)


def test_grouped_experts(pool: Any, note: Note) -> None:
    switches = {**DSA, "moe_grouped_gemm": True}
    if note.begins("EP2, one layer", "moe-grouped-gemm", switches=switches):
        return
    case = "tests.features.moe.grouped_experts.beside_sequential:layers"
    ranks = pool.run(f"{STEPS}:beside", 2, case=case, ep=2, switches=DSA)
    assert all(rank["found"] == ("GroupedExperts", "SequentialMLP") for rank in ranks)
    note.trained(ranks)
