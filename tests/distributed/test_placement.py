"""Moving experts between ranks does not change the main job's training, also across checkpoints."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_dsa.runs import expert_load, expert_placement
from mindspeed_dsa.runs.expert_placement import Placement
from tests.distributed.flags import EP2, ZERO
from tests.distributed.parity import MODEL, TRAINING, Lab, Layout, relative
from tests.support.memory_events import GROUPED
from tests.support.pool import WorkerPool

STEPS, FIRST = 6, 3
SMALL = "--num-layers 3 --hidden-size 32 --dsa-indexer-n-heads 4 --mtp-num-layers 1"
# Orders of experts for three layers, the last of them in the multi-token prediction block.
HERE = {2: [0, 2, 1, 3], 3: [3, 0, 1, 2], 4: [2, 3, 0, 1]}
THERE = {2: [3, 1, 0, 2], 3: [0, 1, 2, 3], 4: [1, 2, 3, 0]}
Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def train(pool: WorkerPool, tmp_path: Path) -> Run:
    """Return a function that trains on two ranks and returns the records of its steps."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "input.py").write_text(inspect.getsource(argparse))
    data = f"--data {tmp_path / 'text'} --data-cache-path {tmp_path / 'cache'} --train-iters {STEPS}"

    def run(
        flags: str, placed: Mapping[int, list[int]] | None = None, report: str = "", **switches: Any
    ) -> Any:
        if placed:
            switches["moe_expert_placement"] = str(tmp_path / "placement.json")
            expert_placement.write(tmp_path / "placement.json", Placement(4, 2, placed))
        if report:
            switches["moe_router_load_report"] = report
        argv = f"{MODEL} {SMALL} {TRAINING} {data} {EP2} {flags}".split()
        if switches.get("moe_grouped_gemm"):
            argv.append("--moe-grouped-gemm")
        outcomes = pool.run("tests.support.example_job:train", 2, argv=argv, switches=switches)
        assert (outcomes[0].memory[GROUPED] > 0) == ("moe_grouped_gemm" in switches) or not outcomes[
            0
        ].records
        return outcomes[0].records

    return run


@pytest.mark.parametrize(
    ("optimizer", "first", "second", "grouped"),
    [
        pytest.param("", HERE, THERE, {}, marks=pytest.mark.full),
        pytest.param(ZERO, HERE, THERE, {}, marks=pytest.mark.full),
        pytest.param("", HERE, None, {}, marks=pytest.mark.full),
        pytest.param(ZERO, None, HERE, {}, marks=pytest.mark.full),
        pytest.param("", HERE, THERE, {"moe_grouped_gemm": True}, marks=pytest.mark.full),
        pytest.param(ZERO, HERE, THERE, {"moe_grouped_gemm": True}, marks=pytest.mark.full),
    ],
    ids=(
        "elsewhere",
        "elsewhere, distributed optimizer",
        "to stock",
        "from stock, distributed optimizer",
        "grouped, elsewhere",
        "grouped, elsewhere, distributed optimizer",
    ),
)
def test_the_placement_may_change_at_a_checkpoint(
    train: Run,
    pool: WorkerPool,
    tmp_path: Path,
    optimizer: str,
    first: Any,
    second: Any,
    grouped: dict[str, Any],
) -> None:
    """Weights and both moments of every expert are loaded into the expert with the same number."""
    stock, middle, final = (str(tmp_path / name) for name in ("stock", "middle", "final"))
    load = str(tmp_path / "load")
    unbroken = train(f"{optimizer} --save {stock}")
    # The run ends after half of its steps, with a checkpoint.
    begun = train(f"{optimizer} --save {middle} --exit-interval {FIRST}", first, load, **grouped)
    ended = train(f"{optimizer} --load {middle} --save {final}", second, load, **grouped)
    for ours, theirs in zip([*begun, *ended], unbroken, strict=True):
        assert ours["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    read = "tests.support.example_job:read"
    before, expected, resumed = pool.run(
        read, 1, checkpoints=[(middle, FIRST), (stock, STEPS), (final, STEPS)]
    )[0]
    assert resumed.keys() == expected.keys()
    # Moments are compared as well.
    assert sum("exp_avg" in name for name in resumed) > 20
    for name, tensor in expected.items():
        # Relative to the update of the last steps, because a checkpoint also has the moments.
        moved = (tensor.double() - before[name].double()).norm().item()
        difference = (resumed[name].double() - tensor.double()).norm().item()
        assert difference <= 5e-3 * max(moved, 1e-12), f"{name}: {difference / max(moved, 1e-12):.1e}"
    _check_ranks(Path(load), first, second)


def _check_ranks(report: Path, first: Any, second: Any) -> None:
    """Check in the load report that each rank got its placed experts' tokens."""
    records = expert_load.read(report)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for record in records:
        orders = (first if record["step"] <= FIRST else second) or {}
        for layer in record["layers"]:
            # Without a placement, experts are in the order of their numbers.
            order = orders.get(layer["layer"], [0, 1, 2, 3])
            assert layer["ranks"] == [expert_placement.rank_loads(layer["experts"], order, 2)]
        assert [layer["layer"] for layer in record["layers"]] == [2, 3, 4]


@pytest.mark.full
def test_experts_begin_with_the_same_weights_wherever_they_are(
    train: Run, pool: WorkerPool, tmp_path: Path
) -> None:
    folders = [str(tmp_path / name) for name in ("stock", "placed")]
    for folder, placed in zip(folders, (None, HERE), strict=True):
        train(f"--train-iters 0 --save {folder}", placed)
    stock, placed = pool.run(
        "tests.support.example_job:read", 1, checkpoints=[(folder, 0) for folder in folders]
    )[0]
    experts = stock["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"]
    assert relative(experts[0], experts[2]) > 1  # experts of different ranks differ
    assert stock.keys() == placed.keys()
    assert all(torch.equal(placed[name], weight) for name, weight in stock.items())


@pytest.mark.full
@pytest.mark.parametrize("layout", [Layout("EP2, placed", 2, EP2), Layout("EP2 x DP2, placed", 4, EP2)])
def test_placed_experts_train_as_one_process(lab: Lab, layout: Layout, tmp_path: Path) -> None:
    # Eight layers, seven with experts, each of them in another order.
    file = tmp_path / "placement.json"
    orders = [HERE[2], HERE[3], THERE[2], HERE[4], THERE[4], HERE[2], HERE[3]]
    expert_placement.write(file, Placement(4, 2, dict(enumerate(orders, start=2))))
    switches = {"moe_expert_placement": str(file)}
    lab.check(Layout(layout.name, layout.world_size, layout.flags, switches=switches))
