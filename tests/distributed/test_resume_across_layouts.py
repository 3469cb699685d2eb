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
        Layout("FSDP2, EP2", 2, f"{EP2} --use-torch-fsdp2", switches={"use_torch_fsdp2": True}),
    )
}
FSDP2 = "FSDP2, EP2"
PLAIN = ""


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
        for rank in ranks:
            assert rank.counts == {SAVED}
            assert rank.optimizers == (2 if rank.experts else 1)
            assert {group[0] for group in rank.groups} == ({False, True} if rank.experts else {False})
            assert {group[1:3] for group in rank.groups} == {(1.0, 0.1), (0.0, 0.0)}
            assert len({group[3:] for group in rank.groups}) == 1
        assert len(source.losses) == STEPS - SAVED
        tolerance = 1e-2 if "--bf16" in model else 1e-4
        for ours, theirs in zip(ranks[0].losses, source.losses, strict=True):
            assert ours == pytest.approx(theirs, rel=tolerance)

    return check


QUICK = {("one process", "EP2"), ("EP2", "one process")}


@pytest.mark.parametrize("optimizer", [PLAIN, ZERO], ids=["plain", "distributed"])
@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_any_layout_goes_on_from_any_other(go: Go, first: str, second: str, optimizer: str) -> None:
    if optimizer == ZERO and first == FSDP2:
        pytest.skip("FSDP2 has no distributed optimizer")
    go(first, optimizer, second, PLAIN if second == FSDP2 else optimizer, "")
