"""A run goes on in another layout, with the optimizer's state as it was saved, bit for bit.

Megatron keeps the parameters that expert parallel ranks do not share in an optimizer of their own, in some
layouts.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.parity import EP2, MODEL, PP2, SHALLOW, TP2, TRAINING, ZERO, Layout
from tests.support.pool import WorkerPool

CASES = "tests.distributed.layout_cases"
STEPS, SAVED = 4, 2
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
        Layout("EP2, stacked", 2, f"{EP2} --moe-grouped-gemm", switches={"moe_grouped_gemm": True}),
        Layout("FSDP2, EP2", 2, f"{EP2} --use-torch-fsdp2", switches={"use_torch_fsdp2": True}),
    )
}
FSDP2, PP2_EP2, STACKED = "FSDP2, EP2", "PP2 x EP2", "EP2, stacked"
PLAIN = ""
LATE_EXPERTS = "--moe-layer-freq [0,0,1,1]"


@dataclass(frozen=True)
class Source:
    """A run that never stopped, with a checkpoint of it on the way."""

    folder: Path
    losses: list[tuple[float, float]]


Go = Callable[[str, str, str, str, str], None]


@pytest.fixture(scope="module")
def go(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Go:
    """From one layout and optimizer to another; whole runs are made once."""
    tmp_path = tmp_path_factory.mktemp("layouts")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "input.py").write_text(inspect.getsource(argparse))
    data = f"--data {tmp_path / 'text'} --data-cache-path {tmp_path / 'cache'} --train-iters {STEPS}"
    sources: dict[tuple[str, str, str], Source] = {}

    def train(function: str, layout: Layout, flags: str, **arguments: object) -> list:
        argv = f"{MODEL} {SHALLOW} {TRAINING} {data} {layout.flags} {flags}".split()
        return pool.run(function, layout.world_size, argv=argv, switches=dict(layout.switches), **arguments)

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
        again = tmp_path / f"again-{first}-{second}-{first_optimizer}-{second_optimizer}-{model}"
        flags = f"{second_optimizer} {model} --no-save --load {source.folder} --ckpt-step {SAVED}"
        ranks = train(f"{CASES}:go_on", LAYOUTS[second], flags, again=str(again))
        files = [(str(source.folder), SAVED), (str(again), SAVED)]
        (saved, saved_steps), (loaded, loaded_steps) = pool.run(f"{CASES}:contents", 1, checkpoints=files)[0]
        if first_optimizer == second_optimizer:
            assert loaded.keys() == saved.keys()
        moments = [name for name in loaded if ".exp_avg" in name]
        assert any("expert" in name for name in moments)
        assert set(moments) == {name for name in saved if ".exp_avg" in name}
        assert [name for name in loaded if name in saved and not loaded[name].equal(saved[name])] == []
        assert saved_steps == loaded_steps == {SAVED}
        parts = 2 if any(rank.experts for rank in ranks) else 1
        for rank in ranks:
            assert rank.counts == {SAVED}
            assert rank.optimizers == parts
            assert {group[0] for group in rank.groups} == ({False, True} if rank.experts else {False})
            assert {group[1:3] for group in rank.groups} == {(1.0, 0.1), (0.0, 0.0)}
            assert len({group[3:] for group in rank.groups}) == 1
        assert len(source.losses) == STEPS - SAVED
        loss, norm = (5e-3, 3e-2) if "--bf16" in model else (1e-5, 1e-4)
        for ours, theirs in zip(ranks[0].losses, source.losses, strict=True):
            assert ours[0] == pytest.approx(theirs[0], rel=loss)
            assert ours[1] == pytest.approx(theirs[1], rel=norm)

    return check


QUICK = {("EP2", "one process", PLAIN), ("one process", "EP2", ZERO)}
PAIRS = [
    (first, second, optimizer)
    for first in LAYOUTS
    for second in LAYOUTS
    for optimizer in (PLAIN, ZERO)
    if not {PP2_EP2, STACKED} & {first, second}
    and (optimizer == PLAIN or first != FSDP2)  # which has no such optimizer
]


@pytest.mark.parametrize(
    ("first", "second", "optimizer"),
    [pytest.param(*each, marks=() if each in QUICK else pytest.mark.full) for each in PAIRS],
)
def test_any_layout_goes_on_from_any_other(go: Go, first: str, second: str, optimizer: str) -> None:
    go(first, optimizer, second, PLAIN if second == FSDP2 else optimizer, "")


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [PLAIN, ZERO], ids=["plain", "distributed"])
@pytest.mark.parametrize(
    ("first", "second"),
    [("one process", "EP2"), ("EP2", "DP2"), ("EP2", FSDP2), ("TP2+SP", FSDP2)],
)
def test_master_weights_go_along(go: Go, first: str, second: str, optimizer: str) -> None:
    go(first, optimizer, second, PLAIN if second == FSDP2 else optimizer, "--bf16")


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [PLAIN, ZERO], ids=["plain", "distributed"])
@pytest.mark.parametrize(("first", "second"), [(STACKED, "one process"), ("DP2", STACKED)])
def test_stacked_experts_go_along(go: Go, first: str, second: str, optimizer: str) -> None:
    go(first, optimizer, second, optimizer, "")


@pytest.mark.full
@pytest.mark.parametrize("model", [LATE_EXPERTS, f"{LATE_EXPERTS} --bf16"], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("first", "second"), [("one process", PP2_EP2), (PP2_EP2, "one process")])
def test_a_first_stage_without_experts(go: Go, first: str, second: str, model: str) -> None:
    """Rank 0, which writes what is common to all, has an empty optimizer of experts."""
    go(first, PLAIN, second, PLAIN, model)
