"""A layer is bit-identical for every placement of its experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mindspeed_dsa.features.moe import numbering
from mindspeed_dsa.features.moe.expert_placement import placing
from mindspeed_dsa.runs import expert_placement
from mindspeed_dsa.runs.expert_placement import Placement
from tests.features.moe.balanced_experts.popular_experts import ALWAYS, watched
from tests.features.moe.balanced_experts.test_chains import assert_links_carry_each_expert_once
from tests.support import model, moe
from tests.support.contexts import earlier_world, running

# -- functions that run in the pool's workers ------------------------------------------------------


BALANCED = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.1,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


def train(
    order: Sequence[int] | None,
    file: str,
    dispatcher: str = "alltoall",
    tp: int = 1,
    switches: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Run two microbatches of a layer with eight experts, in their default slots or in ``order``.

    Returns:
        outputs, input gradients, router gradients, all experts' gradients by number, and the tokens that each
        expert has computed, by rank. Also plans and links of :func:`watched`.
    """
    ranks = dist.get_world_size()
    placed = {"moe_expert_placement": file} if order else {}
    model.start({**placed, **(switches or {})}, ep=ranks, tp=tp, etp=1)
    cfg = moe.config(tp=tp, ep=ranks, num_moe_experts=8, moe_token_dispatcher_type=dispatcher, **BALANCED)
    layer = moe.layer(cfg)
    if order is not None:
        placing.move(layer, order, running("moe-expert-placement"))
    numbers = numbering.experts_of(layer.experts, dist.get_rank())
    computed = dict.fromkeys(numbers, 0)
    for number, expert in zip(numbers, layer.experts.local_experts, strict=True):
        expert.register_forward_hook(_counter(number, computed))
    with watched() as found:
        result = moe.train(layer, [moe.tokens(6, seed=dist.get_rank() + 10 * step) for step in range(2)])
    experts = {
        number: {name: p.grad for name, p in expert.named_parameters()}
        for number, expert in zip(numbers, layer.experts.local_experts, strict=True)
    }
    everywhere: list[Any] = [None] * ranks
    dist.all_gather_object(everywhere, (experts, computed))
    return {
        **found,
        "outputs": result["outputs"],
        "inputs": result["inputs"],
        "router": layer.router.weight.grad,
        "bias": layer.router.local_tokens_per_expert.clone(),
        "experts": {number: each for part, _ in everywhere for number, each in part.items()},
        "computed": [dict(part) for _, part in everywhere],
    }


def _counter(number: int, computed: dict[int, int]) -> Any:
    def count(expert: Any, inputs: Any, output: Any) -> None:
        computed[number] += inputs[0].size(0)

    return count


def join(file: str) -> Any:
    """Let rank 0 read the placement in a world without rank 1, and both ranks in the next world."""
    model.start({"moe_expert_placement": file}, ep=2)
    placements = placing._Chosen(running("moe-expert-placement"))
    with earlier_world() as is_in_it:
        if is_in_it:
            placements.over(2)
    return placements.over(2)


def same(left: Any, right: Any) -> bool:
    """Whether two nested structures are equal bit for bit."""
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return len(left) == len(right) and all(map(same, left, right))


ORDER = [5, 0, 7, 2, 1, 6, 3, 4]


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (2, {}),
        pytest.param(4, {}, marks=pytest.mark.full),
        pytest.param(2, {"dispatcher": "allgather"}, marks=pytest.mark.full),
        pytest.param(2, {"tp": 2}, marks=pytest.mark.full),
    ],
    ids=("EP2", "EP4", "EP2, allgather", "TP2+SP, EP2"),
)
def test_outputs_losses_and_gradients_are_those_of_experts_in_order(pool, tmp_path, ranks, arguments):
    """With auxiliary losses and expert bias, whose counts use the expert's number."""
    file = tmp_path / "placement.json"
    expert_placement.write(file, Placement(8, ranks, {1: ORDER}))
    case = "tests.features.moe.expert_placement.test_layer:train"
    stock = pool.run(case, ranks, order=None, file="", **arguments)
    placed = pool.run(case, ranks, order=ORDER, file=str(file), **arguments)
    for mine, theirs in zip(placed, stock, strict=True):
        for what in ("outputs", "inputs", "router", "bias", "experts"):
            assert same(mine[what], theirs[what]), what
    # Each expert computed the same tokens, on the rank given by the order.
    tokens = {number: n for part in stock[0]["computed"] for number, n in part.items()}
    room = 8 // ranks
    expected = [{e: tokens[e] for e in ORDER[r * room : (r + 1) * room]} for r in range(ranks)]
    assert placed[0]["computed"] == expected != stock[0]["computed"]


def test_moved_experts(pool, tmp_path):
    """Placed experts move from their ranks, under their numbers, with Megatron's results."""
    file = tmp_path / "placement.json"
    expert_placement.write(file, Placement(8, 4, {1: ORDER}))
    case = "tests.features.moe.expert_placement.test_layer:train"
    stock = pool.run(case, 4, order=None, file="")
    placed = pool.run(case, 4, order=ORDER, file=str(file), switches=ALWAYS)
    for mine, theirs in zip(placed, stock, strict=True):
        assert all(mine["plans"])
        assert same(mine["bias"], theirs["bias"])
        moe.assert_same(*map(with_weights, (mine, theirs)), rtol=1e-6)
    assert_links_carry_each_expert_once(placed, ORDER)
    names = {what for rank in placed for _, what in rank["links"]}
    for number, owner in ((number, slot // 2) for slot, number in enumerate(ORDER)):
        paths = [
            what.rpartition(" ranks ")[2] for what in names if what.startswith(f"weights of expert {number} ")
        ]
        assert all(path.startswith(f"{owner} > ") for path in paths)
    assert any(what.count(">") == 3 for what in names)


def test_a_reserve_rank_joins_after_an_in_process_restart(pool, tmp_path):
    file = tmp_path / "placement.json"
    placement = Placement(8, 2, {1: ORDER})
    expert_placement.write(file, placement)
    case = "tests.features.moe.expert_placement.test_layer:join"
    assert pool.run(case, 2, file=str(file)) == [placement] * 2


def with_weights(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return results with all gradients of weights under ``weights``."""
    experts = {
        f"{number} {name}": gradient
        for number, each in found["experts"].items()
        for name, gradient in each.items()
        if gradient is not None
    }
    return {**found, "weights": {"router": found["router"], **experts}}
