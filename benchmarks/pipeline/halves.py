"""Steps with microbatches in two halves, EP2 without a pipeline: the hidden fraction of transfers.

The ceiling is a step's gain if every transfer were hidden as far as there is work above it, by the separate
times of the stages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.linkbed import LinkBed
from benchmarks.moe.problem import deviation, minima, start
from benchmarks.pipeline.pairs import QUICK, Sizes, step_of
from benchmarks.registry import Metrics

SWITCHES = {
    "moe_batch_overlap": True,
    "moe_batch_overlap_attention": True,
    "moe_alltoall_overlap_comm": True,
}
SIZES = Sizes(layers=4, microbatches=1, sequences=2, tokens=512, rounds=5)
VARIANTS = ("stock", "whole, overlapped", "halves of tokens", "halves", "no transfers")
OURS = VARIANTS[1:4]


def run(link: str, quick: bool) -> Metrics:
    """Return the cell's entries."""
    sizes = dataclasses.replace(QUICK, sequences=2) if quick else SIZES
    with LinkBed(2, link) as bed:
        found = bed.run("benchmarks.pipeline.halves:measure", sizes=sizes)[0]
    print(f"halves: {found}", file=sys.stderr, flush=True)
    return metrics(found, sizes.layers)


def metrics(found: Mapping[str, Any], layers: int) -> Metrics:
    """Convert least times to ratios.

    Args:
        found: result of :func:`measure`.
        layers: number of layers, all with experts.
    """
    wall = {name: 1e3 * timing.wall for name, timing in found["times"].items()}
    parts = _by_way({name: 1e3 * timing.wall for name, timing in found["parts"].items()})
    exposed = wall["stock"] - wall["no transfers"]
    ceiling = wall["stock"] / (wall["stock"] - hideable(parts, exposed, layers))
    speedup = wall["stock"] / wall["halves"]
    return {
        "batch_overlap_speedup": speedup,
        "batch_overlap": {
            "ceiling": ceiling,
            "fraction_of_ceiling": (speedup - 1) / (ceiling - 1),
            "measured_choice": found["choice"],
            "speedup_of_halves_of_tokens": wall["stock"] / wall["halves of tokens"],
            "speedup_of_overlapped_whole": wall["stock"] / wall["whole, overlapped"],
            "a2a_hidden_fraction": (wall["stock"] - wall["halves"]) / exposed,
            "exposed_over_step": exposed / wall["stock"],
            "milliseconds": wall,
            "milliseconds_median": {name: 1e3 * each.median for name, each in found["times"].items()},
            "milliseconds_of_stages": parts,
            "processor_milliseconds": {name: 1e3 * each.processor for name, each in found["times"].items()},
            "deviation": found["deviation"],
        },
    }


_TRANSFERS = 8
"""All-to-alls of the halves of one layer, in forward and backward."""


def hideable(parts: Mapping[str, float], exposed: float, layers: int) -> float:
    """Return the time of a step's transfers that have work above them.

    A transfer takes an equal part of the time that all of them cost the stock step, which is more than alone
    on the link. In each layer one dispatch is above attention; the other dispatch and a combine are above
    experts and shared expert of a half. The other combine is above the next layer's attention, or above the
    shared expert after the last layer.

    Args:
        parts: times of a half's attention, experts and shared expert, in either direction.
        exposed: time of all transfers of a stock step.
        layers: number of layers, all with experts.
    """
    total, transfer = 0.0, exposed / (_TRANSFERS * layers)
    for way in ("forward", "backward"):
        attention, experts, shared = (parts[f"{part}, {way}"] for part in ("attention", "experts", "shared"))
        above = [attention, experts + shared, experts + shared, attention]
        above_last = [attention, experts, experts, 2 * shared]
        for works in [above] * (layers - 1) + [above_last]:
            total += sum(min(transfer, work) for work in works)
    return total


def _by_way(parts: dict[str, float]) -> dict[str, float]:
    """Replace times of both directions by times of backward."""
    ways = {name: wall for name, wall in parts.items() if not name.endswith(_BOTH)}
    for name in parts.keys() - ways.keys():
        part = name.removesuffix(_BOTH)
        ways[f"{part}, backward"] = parts[name] - parts[f"{part}, forward"]
    return ways


_BOTH = ", both"


def measure(sizes: Sizes) -> dict[str, Any]:
    """Return the layers' choice in their first step, and times of variants; the same on all ranks."""
    from mindspeed_dsa.features.moe.batch_overlap.choice import State
    from mindspeed_dsa.session import current

    start(**SWITCHES)
    session = current()
    assert session is not None
    state = session.contexts["moe-batch-overlap"].state(State)
    models: list[Any] = []
    step = step_of(sizes, models.append)
    layers = list(models[0].decoder.layers)

    def variant(name: str) -> Callable[[], Any]:
        def work() -> Any:
            with _way(name, layers, state):
                return step(name)

        return work

    step("measures")
    (choice,) = {state.modes[layer] for layer in layers}
    works = {name: variant(name) for name in VARIANTS}
    expected = works["stock"]()
    worst = max(deviation(works[name](), expected) for name in OURS)
    return {
        "choice": choice,
        "deviation": worst,
        "times": minima(works, sizes.rounds),
        "parts": minima(_parts(layers[0], sizes), sizes.rounds),
    }


@contextlib.contextmanager
def _way(name: str, layers: list[Any], state: Any) -> Iterator[None]:
    """Run layers in the block as stock does, as ``--moe-alltoall-overlap-comm`` does, or in halves."""
    from mindspeed_dsa.features.moe.alltoall_overlap import layer as whole

    with contextlib.ExitStack() as stack:
        modes = dict.fromkeys(layers, "interleaved" if name == "halves" else "whole")
        dispatchers = [layer.mlp.token_dispatcher for layer in layers]
        modes |= dict.fromkeys(dispatchers, "interleaved" if name == "halves of tokens" else "whole")
        stack.enter_context(mock.patch.object(state, "modes", modes))
        if name != "whole, overlapped":
            stack.enter_context(mock.patch.object(whole, "is_served", return_value=False))
        yield


def _parts(layer: Any, sizes: Sizes) -> dict[str, Callable[[], object]]:
    """Return parts of a half: attention with router and permutation, experts, shared expert, a transfer."""
    moe, dispatcher = layer.mlp, layer.mlp.token_dispatcher
    hidden = torch.randn(sizes.tokens, sizes.sequences // 2, sizes.hidden)
    rows = hidden.numel() // sizes.hidden * sizes.topk

    def attention(hidden: Tensor) -> Tensor:
        hidden, _ = layer._forward_attention(hidden)
        normalised = layer.pre_mlp_layernorm(hidden)
        probs, routing_map = moe.route(normalised)
        permuted: Tensor = dispatcher.dispatch_preprocess(normalised, routing_map, probs)[0]
        return permuted

    def experts(arrived: Tensor) -> Tensor:
        count = torch.full((len(moe.local_expert_indices),), rows // len(moe.local_expert_indices))
        output: Tensor = moe.experts(arrived, count, torch.ones(rows))[0]
        return output

    works: dict[str, Callable[[], object]] = {}
    for name, part, operand in (
        ("attention", attention, hidden),
        ("experts", experts, torch.randn(rows, sizes.hidden)),
        ("shared", moe.shared_experts, hidden),
    ):
        works[f"{name}, forward"] = partial(_forward, part, operand)
        works[f"{name}{_BOTH}"] = partial(_both, part, operand)
    # An even number of rows, for two ranks.
    sent = torch.randn(rows // 2 * 2, sizes.hidden)
    works["transfer"] = lambda: dist.all_to_all_single(torch.empty_like(sent), sent)
    return works


def _forward(part: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
    return part(given.detach().requires_grad_())


def _both(part: Callable[[Tensor], Tensor], given: Tensor) -> None:
    output = _forward(part, given)
    output.backward(torch.ones_like(output))
