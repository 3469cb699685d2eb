"""A run resumes from a checkpoint in its own or another layout, with the saved optimizer state.

In some layouts, Megatron keeps expert parameters in a separate optimizer.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.distributed.flags import (
    BF16,
    DUALPIPEV,
    EP2,
    EXPERTS_CUT,
    FOUR_MICROBATCHES,
    FSDP2,
    FULLY_SHARDED,
    FUSED,
    GROUP,
    MTP,
    PP2,
    SHALLOW,
    STACKED,
    TIED,
    TP2,
    VPP2,
    WITH_SWAP,
    ZERO,
    V,
)
from tests.distributed.parity import MODEL, TRAINING, Lab, Layout
from tests.support import example_job
from tests.support.pool import WorkerPool

STEPS, SAVED = 4, 2
CP2 = "--context-parallel-size 2"
ON_CP2 = {**FUSED, "context_parallel_size": 2}
DIVIDES = "cp_shard_vocabulary"
DIVIDED = {DIVIDES: True, "fused_linear_cross_entropy": True}
LAYOUTS = {
    each.name: each
    for each in (
        Layout("one process"),
        Layout("DP2", 2),
        Layout("EP2", 2, EP2),
        Layout("TP2+SP", 2, TP2),
        Layout("TP2+SP, extended", 2, TP2, switches={"moe_tp_extend_ep": True}),
        Layout("PP2", 2, PP2),
        Layout("PP2 x EP2", 4, f"{PP2} {EP2}"),
        Layout("EP2, stacked", 2, f"{EP2} {STACKED}", switches=GROUP),
        Layout("PP2 x VPP2", 2, f"{PP2} {VPP2}"),
        Layout("DualPipeV", 2, f"{PP2} {DUALPIPEV}", switches=V),
        Layout("DualPipeV x EP2", 4, f"{PP2} {EP2} {DUALPIPEV} {FOUR_MICROBATCHES}", switches=V),
        Layout(
            "DualPipeV x EP2, FSDP2",
            4,
            f"{PP2} {EP2} {DUALPIPEV} {FOUR_MICROBATCHES} {FULLY_SHARDED}",
            switches={**V, "use_torch_fsdp2": True},
        ),
        Layout("FSDP2, EP2", 2, f"{EP2} {FULLY_SHARDED}", switches={"use_torch_fsdp2": True}),
        Layout("CP2", 2, CP2, switches=ON_CP2),
        Layout("CP2, divided", 2, CP2, switches={**ON_CP2, **DIVIDED}),
        Layout("CP2 x EP2, divided", 2, f"{CP2} {EP2}", switches={**ON_CP2, **DIVIDED}),
        Layout("CP2 x TP2, divided", 4, f"{CP2} {TP2}", switches={**ON_CP2, **DIVIDED}),
        Layout("CP2 x PP2, divided", 4, f"{CP2} {PP2}", switches={**ON_CP2, **DIVIDED}),
    )
}
SHARDED, PP2_EP2, GROUPED = "FSDP2, EP2", "PP2 x EP2", "EP2, stacked"
ON_CONTEXT_RANKS = {name for name in LAYOUTS if "CP2" in name}
ELSEWHERE = {PP2_EP2, GROUPED, "PP2 x VPP2", "DualPipeV", "DualPipeV x EP2", "DualPipeV x EP2, FSDP2"}
ELSEWHERE |= ON_CONTEXT_RANKS
"""Layouts that have their own tests below."""
PLAIN = ""
LATE_EXPERTS = "--moe-layer-freq [0,0,1,1]"


@dataclass(frozen=True)
class Source:
    """An uninterrupted run and the folder of its intermediate checkpoint."""

    folder: Path
    losses: list[tuple[float, float]]


Go = Callable[[str, str, str, str, str], None]


@pytest.fixture(scope="module")
def go(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Go:
    """Return a check that resumes from one layout into another; uninterrupted runs are cached."""
    tmp_path = tmp_path_factory.mktemp("layouts")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "input.py").write_text(inspect.getsource(argparse))
    data = f"--data {tmp_path / 'text'} --data-cache-path {tmp_path / 'cache'} --train-iters {STEPS}"
    sources: dict[tuple[str, str, str], Source] = {}

    def train(function: str, layout: Layout, flags: str, **arguments: object) -> list:
        argv = f"{MODEL} {SHALLOW} {TRAINING} {data} {layout.flags} {flags}".split()
        return pool.run(function, layout.world_size, argv=argv, switches=dict(layout.switches), **arguments)

    # Uninterrupted runs are shared between the checks.
    def whole(layout: str, optimizer: str, model: str) -> Source:
        key = layout, optimizer, model
        if key not in sources:
            folder = tmp_path / f"whole-{len(sources)}"
            flags = f"{optimizer} {model} --save {folder} --save-interval {SAVED}"
            ranks = train("tests.support.example_job:train", LAYOUTS[layout], flags)
            losses = [(each["lm_loss"], each["grad_norm"]) for each in ranks[0].records[SAVED:]]
            sources[key] = Source(folder, losses)
        return sources[key]

    def check(first: str, first_optimizer: str, second: str, second_optimizer: str, model: str) -> None:
        source = whole(first, first_optimizer, model)
        # The resumed run writes its state right after loading.
        again = tmp_path / f"again-{first}-{second}-{first_optimizer}-{second_optimizer}-{model}"
        flags = f"{second_optimizer} {model} --no-save --load {source.folder} --ckpt-step {SAVED}"
        ranks = train(f"{__name__}:go_on", LAYOUTS[second], flags, again=str(again))
        files = [(str(source.folder), SAVED), (str(again), SAVED)]
        (saved, saved_steps), (loaded, loaded_steps) = pool.run(f"{__name__}:contents", 1, checkpoints=files)[
            0
        ]
        # Another optimizer saves other entries.
        if first_optimizer == second_optimizer:
            assert loaded.keys() == saved.keys()
        moments = [name for name in loaded if ".exp_avg" in name]
        assert any("expert" in name for name in moments)
        assert set(moments) == {name for name in saved if ".exp_avg" in name}
        assert [name for name in loaded if name in saved and not loaded[name].equal(saved[name])] == []
        assert saved_steps == loaded_steps == {SAVED}
        # Expert parallel weights and a divided vocabulary have optimizers of their own.
        parts = 1 + any(rank.experts for rank in ranks) + LAYOUTS[second].switches.get(DIVIDES, False)
        for rank in ranks:
            assert rank.counts == {SAVED}
            assert rank.optimizers == parts
            assert {group[0] for group in rank.groups} == ({False, True} if rank.experts else {False})
            # Groups with and without weight decay.
            assert {group[1:3] for group in rank.groups} == {(1.0, 0.1), (0.0, 0.0)}
            assert len({group[3:] for group in rank.groups}) == 1
        assert len(source.losses) == STEPS - SAVED
        # In bf16, sums that are split in another way round differently.
        loss, norm = (5e-3, 3e-2) if BF16 in model else (1e-5, 1e-4)
        for ours, theirs in zip(ranks[0].losses, source.losses, strict=True):
            assert ours[0] == pytest.approx(theirs[0], rel=loss)
            assert ours[1] == pytest.approx(theirs[1], rel=norm)

    return check


CIRCLE = [name for name in LAYOUTS if name not in ELSEWHERE]
# A checkpoint knows no layout. Each layout saves for one other and loads from one other, in both directions
# of the circle, and goes on by itself.
ONWARD = list(zip(CIRCLE, CIRCLE[1:] + CIRCLE[:1], strict=True))
PAIRS = [(first, second, PLAIN) for first, second in [*ONWARD, (SHARDED, SHARDED)]]
# FSDP2 has no distributed optimizer to begin from.
PAIRS += [
    (first, second, ZERO)
    for second, first in [*ONWARD, *zip(CIRCLE, CIRCLE, strict=True)]
    if first != SHARDED
]
QUICK = ("EP2", "one process", PLAIN)


@pytest.mark.parametrize(
    ("first", "second", "optimizer"),
    [QUICK, *(pytest.param(*each, marks=pytest.mark.full) for each in PAIRS)],
)
def test_a_layout_goes_on_from_another(go: Go, first: str, second: str, optimizer: str) -> None:
    go(first, optimizer, second, PLAIN if second == SHARDED else optimizer, "")


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [PLAIN, ZERO], ids=["plain", "distributed"])
@pytest.mark.parametrize(
    ("first", "second"),
    [("one process", "EP2"), ("EP2", "DP2"), ("EP2", SHARDED), ("TP2+SP", SHARDED)],
)
def test_master_weights_go_along(go: Go, first: str, second: str, optimizer: str) -> None:
    go(first, optimizer, second, PLAIN if second == SHARDED else optimizer, BF16)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [PLAIN, ZERO], ids=["plain", "distributed"])
@pytest.mark.parametrize(("first", "second"), [(GROUPED, "one process"), ("DP2", GROUPED)])
def test_stacked_experts_go_along(go: Go, first: str, second: str, optimizer: str) -> None:
    go(first, optimizer, second, optimizer, "")


@pytest.mark.full
@pytest.mark.parametrize("model", [LATE_EXPERTS, f"{LATE_EXPERTS} {BF16}"], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("first", "second"), [("one process", PP2_EP2), (PP2_EP2, "one process")])
def test_a_first_stage_without_experts(go: Go, first: str, second: str, model: str) -> None:
    # Rank 0 writes the common state, although its optimizer of experts is empty.
    go(first, PLAIN, second, PLAIN, model)


@pytest.mark.full
@pytest.mark.parametrize(
    ("other", "model", "optimizer"),
    [
        ("one process", "", PLAIN),
        ("one process", MTP, ZERO),
        ("PP2", f"{BF16} {TIED}", PLAIN),
        ("PP2", "", ZERO),
        ("PP2 x VPP2", MTP, PLAIN),
        ("PP2 x VPP2", f"{BF16} {TIED}", ZERO),
        ("DualPipeV x EP2", "", ZERO),
        ("DualPipeV x EP2", f"{BF16} {TIED}", PLAIN),
    ],
)
def test_dualpipev_goes_along(go: Go, other: str, model: str, optimizer: str) -> None:
    # DualPipeV places the second half of the layers on the ranks in reverse order.
    go("DualPipeV", optimizer, other, optimizer, model)
    go(other, optimizer, "DualPipeV", optimizer, model)


@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "second", "optimizer", "model"),
    [
        ("CP2, divided", "one process", PLAIN, ""),
        ("one process", "CP2, divided", PLAIN, f"{BF16} {TIED}"),
        ("CP2, divided", "one process", ZERO, f"{BF16} {TIED}"),
        ("CP2", "CP2 x EP2, divided", PLAIN, ""),
        ("CP2 x EP2, divided", "CP2", ZERO, f"{BF16} {TIED}"),
        ("EP2", "CP2, divided", ZERO, ""),
        ("CP2, divided", "EP2", PLAIN, f"{BF16} {TIED}"),
        ("TP2+SP", "CP2 x TP2, divided", ZERO, f"{BF16} {TIED}"),
        ("CP2 x TP2, divided", "TP2+SP", PLAIN, ""),
        ("PP2", "CP2 x PP2, divided", PLAIN, f"{BF16} {TIED}"),
        ("CP2 x PP2, divided", "PP2", ZERO, ""),
        ("CP2, divided", "CP2 x EP2, divided", ZERO, ""),
        ("CP2 x EP2, divided", "CP2, divided", PLAIN, f"{BF16} {TIED}"),
    ],
)
def test_a_divided_vocabulary_goes_along(go: Go, first: str, second: str, optimizer: str, model: str) -> None:
    go(first, optimizer, second, optimizer, model)


# -- weights that FSDP2 shards -----------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("model", ["", MTP], ids=["", "MTP"])
@pytest.mark.parametrize("other", ["one process", "DualPipeV x EP2"])
def test_shards_of_dualpipev_go_along(go: Go, other: str, model: str) -> None:
    go("DualPipeV x EP2, FSDP2", PLAIN, other, PLAIN, model)
    go(other, PLAIN, "DualPipeV x EP2, FSDP2", PLAIN, model)


def with_fsdp2(name: str, ranks: int, flags: str, model: str = "", **switches: Any) -> Layout:
    flags, model = f"{flags} {FULLY_SHARDED}", f"{SHALLOW} {model}"
    return Layout(f"FSDP2: {name}", ranks, flags, model, switches={**FSDP2, **switches})


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        with_fsdp2("DP2, fp32", 2, "", "--num-layers 2"),
        with_fsdp2("PP2 x VPP2 x EP2", 4, f"{PP2} {VPP2} {EP2}", BF16, **WITH_SWAP),
        with_fsdp2("TP2+SP x DP2", 4, TP2, BF16),
        with_fsdp2(
            "DualPipeV x EP2, pairs, weight gradients later",
            4,
            f"{PP2} {EP2} {DUALPIPEV} {FOUR_MICROBATCHES}",
            BF16,
            **{**V, "moe_fb_overlap": True, "dualpipev_dw_detach": True},
        ),
        with_fsdp2("EP2 x EDP2, MTP", 4, EP2, f"{BF16} {MTP}"),
        with_fsdp2(
            "EP2 x EDP2, grouped experts sharded",
            4,
            f"{EP2} {STACKED}",
            BF16,
            **{**EXPERTS_CUT, **GROUP, **WITH_SWAP},
        ),
    ],
    ids=lambda layout: layout.name,
)
def test_fsdp2_resumes_to_the_bit(lab: Lab, layout: Layout) -> None:
    (whole, resumed), contents = lab.resume(layout, step=3)
    results = [[(each["lm_loss"], each["grad_norm"]) for each in records] for records in (whole, resumed)]
    assert len(results[0]) == 2
    assert results[1] == results[0]
    first, second = contents
    assert any("exp_avg_sq" in name for name in first)
    assert first.keys() == second.keys()
    assert [name for name in first if not first[name].equal(second[name])] == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "loss", "norm", "switches"),
    [(f"{SHALLOW} {BF16}", 1e-3, 2e-2, {}), (SHALLOW, 1e-5, 1e-4, {}), (SHALLOW, 1e-5, 1e-4, EXPERTS_CUT)],
    ids=["bf16", "fp32", "experts sharded"],
)
def test_fsdp2_goes_on_from_the_distributed_optimizer(
    lab: Lab, model: str, loss: float, norm: float, switches: dict[str, bool]
) -> None:
    layout = Layout("EP2, distributed optimizer", 2, f"{EP2} {ZERO}", f"{SHALLOW} {model}", switches=FUSED)
    # Experts are only sharded where two ranks hold the same ones, hence four ranks.
    into = with_fsdp2("into", 4, EP2 if switches else f"{PP2} {EP2}", model, **switches)
    (whole, resumed), _ = lab.resume(layout, 3, into)
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=loss)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=norm)


# -- the ranks' work --------------------------------------------------------------------------


@dataclass(frozen=True)
class Resumed:
    """A resumed run, seen by one rank.

    Attributes:
        losses: loss and gradient norm per step.
        counts: distinct step counts of the torch optimizers right after loading.
        groups: ``(is_expert_parallel, wd_mult, weight_decay, lr, betas, eps)`` of the param groups that have
            parameters.
        experts: number of parameters that Megatron marks as expert parallel.
        optimizers: number of optimizers that Megatron has chained.
    """

    losses: list[tuple[float, float]]
    counts: set[float]
    groups: list[tuple[Any, ...]]
    experts: int
    optimizers: int


def go_on(argv: Sequence[str], again: str, switches: Mapping[str, Any]) -> Resumed:
    """Run the job, and save the loaded state to the folder ``again`` before the first step."""
    from dsa_job import checkpoint

    load = checkpoint.load
    facts: dict[str, Any] = {}

    def load_and_save(args: Any, folder: Path, model: Any, optimizer: Any, scheduler: Any) -> Any:
        progress = load(args, folder, model, optimizer, scheduler)
        parts = [chained.optimizer for chained in optimizer.chained_optimizers]
        facts["counts"] = _counts(parts)
        facts["groups"] = [_facts(group) for part in parts for group in part.param_groups if group["params"]]
        parameters = [parameter for chunk in model for parameter in chunk.parameters()]
        facts["experts"] = sum(not getattr(parameter, "allreduce", True) for parameter in parameters)
        facts["optimizers"] = len(parts)
        checkpoint.save(args, Path(again), progress, model, optimizer, scheduler).execute_sync()
        return progress

    with mock.patch.object(checkpoint, "load", load_and_save):
        outcome = example_job.train(argv, switches=switches)
    losses = [(each["lm_loss"], each["grad_norm"]) for each in outcome.records]
    return Resumed(losses, **facts)


def _counts(parts: Sequence[Any]) -> set[float]:
    return {float(state["step"]) for part in parts for state in part.state.values()}


def _facts(group: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("is_expert_parallel", "wd_mult", "weight_decay", "lr", "betas", "eps")
    return tuple(group[name] for name in names)


def contents(checkpoints: Sequence[tuple[str, int]]) -> list[tuple[dict[str, torch.Tensor], set[float]]]:
    """Return tensors by name, and the optimizers' step counts, of some distributed checkpoints."""
    from megatron.core import dist_checkpointing

    results = []
    for (folder, step), tensors in zip(checkpoints, example_job.read(checkpoints), strict=True):
        common = dist_checkpointing.load_common_state_dict(str(Path(folder) / f"iter_{step:07d}"))
        results.append((tensors, set(_saved_counts(common["optimizer"]))))
    return results


def _saved_counts(state: Any) -> Any:
    if isinstance(state, dict):
        for name, value in state.items():
            if name in ("step", "common_step"):
                yield float(value)
            else:
                yield from _saved_counts(value)
    elif isinstance(state, list):
        for each in state:
            yield from _saved_counts(each)
