"""How much of a transfer hides behind the work beside it, on two ranks with a slow link.

Sizes are fitted, direction by direction, until a transfer takes about as long as what hides it: of a shorter
one little would be known, and a longer one could not be hidden.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import log
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.linkbed import LinkBed
from benchmarks.moe.problem import minima
from benchmarks.registry import Metrics
from benchmarks.tp_overlap.cells import slowest
from mindspeed_dsa.context_parallel.gather import GatheredRows, Members
from mindspeed_dsa.context_parallel.layout import Zigzag
from mindspeed_dsa.features.attention.context_parallel import ring
from mindspeed_dsa.features.attention.context_parallel.dense import DenseAttention, FromLatents, Payload
from mindspeed_dsa.parallel import buffer_pool

ALLOWED = 0.8, 1.25
"""Of a transfer over what hides it."""
_AIM, _CLOSE = 0.95, (0.86, 1.05)
"""What sizes are fitted to, and how close is close enough: a full measurement differs a bit."""
_STEP = 16
_BEGIN = {"key gather": (1088, 512), "latents": (448, 64), "grouped keys": (128, 64)}
"""Sizes, forward and backward, to be tried first: they fit cores that multiply at 60 GFLOP/s and 2 Gbit/s."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement: what travels is as large whatever is fitted.

    Attributes:
        rows: of a rank, which gathers keys; the width of the projection beside it is fitted.
        width: of a key.
        tokens: of a rank in a ring; the length of the sequences that they make up is fitted.
        rounds: each runs every variant once.
        fits: sizes that are tried, and measurements that are repeated because they did not show what those
            promised.
    """

    rows: int = 8192
    width: int = 704
    tokens: int = 8192
    rounds: int = 5
    fits: int = 8


QUICK = Sizes(rows=128, tokens=64, rounds=1, fits=2)


@dataclass(frozen=True)
class Problem:
    """One direction of one algorithm.

    Attributes:
        together: transfers beside work.
        alone: the transfers.
        work: without transfers, all of it.
        cover: of the last call of ``work``, the seconds that can hide transfers; default: all of it.
        prepare: is called before each of these, and not timed.
    """

    together: Callable[[], object]
    alone: Callable[[], object]
    work: Callable[[], object]
    cover: Callable[[], float] | None = None
    prepare: Callable[[str], object] | None = None


def run(link: str, quick: bool) -> Metrics:
    """The cell's entries."""
    with LinkBed(2, link, wide=True) as bed:
        found = bed.run("benchmarks.context_parallel.hiding:measure", sizes=QUICK if quick else Sizes())[0]
    print(f"hiding: {found}", file=sys.stderr, flush=True)
    return {
        "hidden_fraction": {name: each["hidden"] for name, each in found.items()},
        "hiding": found,
    }


def measure(sizes: Sizes) -> dict[str, Any]:
    """By algorithm and direction; the same on all ranks."""
    found = {}
    for direction in ("forward", "backward"):
        back = direction == "backward"
        problems = {"key gather": partial(gathering, sizes, backward=back)}
        for name, of in (("latents", latents), ("grouped keys", grouped)):
            problems[f"ring of {name}"] = partial(going_around, of, sizes.tokens, backward=back)
        for name, problem in problems.items():
            begin = _BEGIN[name.removeprefix("ring of ")][back]
            found[f"{name}, {direction}"] = fitted(problem, begin, sizes)
    return found


def fitted(build: Callable[[int], Problem], size: int, sizes: Sizes) -> dict[str, Any]:
    """Figures of a problem whose transfers take as long as what hides them.

    Args:
        build: of a size, with which transfers take an ever smaller part of what hides them.
        size: to begin with.
        sizes: of the measurement.
    """
    tried: dict[int, float] = {}
    for number in range(sizes.fits):
        if size not in tried:
            times = timed(build(size), min(2, sizes.rounds), ("alone", "work"))
            tried[size] = times["alone"] / times["cover"]
        following = next_size(tried)
        if following in tried or number == sizes.fits - 1:
            size = min(tried, key=lambda one: abs(log(tried[one] / _AIM)))
            times = timed(build(size), sizes.rounds, ("together", "alone", "work"))
            tried.pop(size, None)  # the last one measured stands last
            tried[size] = times["alone"] / times["cover"]
            if ALLOWED[0] <= tried[size] <= ALLOWED[1] or number == sizes.fits - 1:
                break
            following = next_size(tried)
        size = following
    ratio = tried[size]
    saved = times["alone"] + times["work"] - times["together"]
    hidden: float | str = saved / min(times["alone"], times["cover"])
    if not ALLOWED[0] <= ratio <= ALLOWED[1]:
        hidden = (
            f"not measured: the transfer took {ratio:.2f} of what hides it, not {ALLOWED[0]} to {ALLOWED[1]}"
        )
    return {
        "hidden": hidden,
        "transfer_over_cover": ratio,
        "size": size,
        "tried": tried,
        "milliseconds": {name: 1e3 * seconds for name, seconds in times.items()},
    }


def next_size(tried: Mapping[int, float]) -> int:
    """The size to try next; one of those that were, if no other one would be closer.

    Args:
        tried: what transfers took of what hid them, by size; less with larger ones.
    """
    last = next(reversed(tried))
    if _CLOSE[0] <= tried[last] <= _CLOSE[1]:
        return last
    short = max((size for size, ratio in tried.items() if ratio > _AIM), default=None)
    long = min((size for size, ratio in tried.items() if ratio <= _AIM), default=None)
    if short is None or long is None or short >= long:
        found = last * min(3.0, max(1 / 3, tried[last] / _AIM))
    else:
        part = log(tried[short] / _AIM) / log(tried[short] / tried[long])
        found = short * (long / short) ** part
    return max(_STEP, round(found / _STEP) * _STEP)


def timed(problem: Problem, rounds: int, names: Sequence[str]) -> dict[str, float]:
    """Least seconds of alternating rounds, by variant, and of what hides transfers."""
    covers: list[float] = []

    def work() -> None:
        problem.work()
        if problem.cover is not None:
            covers.append(problem.cover())

    works = {"together": problem.together, "alone": problem.alone, "work": work}
    found = minima({name: works[name] for name in names}, rounds, problem.prepare)
    seconds = {name: each.wall for name, each in found.items()}
    return {**seconds, "cover": slowest(min(covers)) if covers else seconds["work"]}


def gathering(sizes: Sizes, width: int, *, backward: bool) -> Problem:
    """Keys travel beside a projection of as many rows, to ``width``; in backward its gradients' sums do."""
    members = Members.of(dist.group.WORLD, Zigzag(2), 2 * sizes.rows)
    local = torch.randn(sizes.rows, 1, sizes.width, requires_grad=True)
    states = torch.randn(sizes.rows, 512, requires_grad=True)
    weight = torch.randn(width, 512, requires_grad=True)
    of_keys, of_product = torch.randn(2 * sizes.rows, 1, sizes.width), torch.randn(sizes.rows, width)
    made: dict[str, Tensor] = {}

    def transfer() -> None:
        made["keys"] = GatheredRows(local, members).wait()

    def product() -> None:
        made["product"] = F.linear(states, weight)

    def both() -> None:
        on_the_way = GatheredRows(local, members)
        product()
        made["keys"] = on_the_way.wait()

    forwards = {"together": both, "alone": transfer, "work": product}
    if not backward:
        return Problem(**forwards, prepare=lambda name: made.clear())

    def prepare(name: str) -> None:
        made.clear()
        for leaf in (local, states, weight):
            leaf.grad = None
        forwards[name]()

    def back() -> None:
        gradients = {"keys": of_keys, "product": of_product}
        torch.autograd.backward(list(made.values()), [gradients[name] for name in made])

    return Problem(back, back, back, prepare=prepare)


Around = tuple[Tensor, Payload]
"""Queries and what goes around."""


def latents(rows: int, batch: int) -> Around:
    """Latent attention in DeepSeek-V3.2's widths; with one head, because more take longer than transfers."""
    weight = torch.randn(128 + 128, 512).div_(16).requires_grad_()
    payload = torch.randn(rows, batch, 1, 576, requires_grad=True)
    query = torch.randn(rows, batch, 1, 192, requires_grad=True)
    return query, Payload(payload, FromLatents(1, 512, 128), (weight,))


def grouped(rows: int, batch: int) -> Around:
    """Four heads that share two keys."""
    key, value = (torch.randn(rows, batch, 2, 128, requires_grad=True) for _ in range(2))
    return torch.randn(rows, batch, 4, 128, requires_grad=True), Payload.of(key, value)


def going_around(of: Callable[[int, int], Around], tokens: int, rows: int, *, backward: bool) -> Problem:
    """A ring's attention. On two ranks the own block, half of the work, hides what is on its way."""
    query, payload = of(rows, max(1, tokens // rows))
    block = payload.rows.detach().contiguous()
    gradient, made = torch.randn(*query.shape[:3], _value_dim(payload)), {}
    covers: list[float] = []

    def attend() -> None:
        made["out"] = ring.ring_attention(DenseAttention(0.1), query, payload, dist.group.WORLD)

    def transfer() -> None:
        for _ in range(2 if backward else 1):  # the gradient's sums follow
            buffer_pool.give_back(ring.pass_on(block, dist.group.WORLD).wait())

    def back() -> None:
        made["out"].backward(gradient)

    main = back if backward else attend

    def without_transfers() -> None:
        covers.clear()
        with _standing_still(covers):
            main()

    def prepare(name: str) -> None:
        made.clear()
        if backward and name != "alone":
            with _standing_still([]):
                attend()

    return Problem(main, transfer, without_transfers, lambda: sum(covers), prepare)


def _value_dim(payload: Payload) -> int:
    with torch.no_grad():
        return payload.expansion.keys_and_values(payload.rows[:1], payload.weights)[1].size(-1)


@contextmanager
def _standing_still(covers: list[float]) -> Iterator[None]:
    """Nothing is sent: the work is the same, its results are not.

    Args:
        covers: gets the seconds between the start of each transfer and the wait for it.
    """

    class Here:
        def __init__(self, tensor: Tensor, *unused: Any) -> None:
            self._arrived, self._since = buffer_pool.take(tensor), time.perf_counter()

        def wait(self) -> Tensor:
            covers.append(time.perf_counter() - self._since)
            return self._arrived

    with mock.patch.object(ring, "pass_on", Here):
        yield
