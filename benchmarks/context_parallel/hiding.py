"""Fraction of a transfer that hides behind concurrent work, on two ranks with a slow link.

Sizes are fitted per direction until a transfer takes about as long as the work that hides it. The hidden part
of a shorter transfer is hard to measure, and a longer one cannot be hidden.
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
"""Accepted range of transfer time over covering time."""
_AIM, _CLOSE = 0.95, (0.86, 1.05)
"""Target ratio of a fit, and the range that ends it; a full measurement differs a bit from a fit."""
_STEP = 16
_BEGIN = {"key gather": (1088, 512), "latents": (448, 64), "grouped keys": (128, 64)}
"""Initial sizes, forward and backward. They fit cores with 60 GFLOP/s and a link with 2 Gbit/s."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement. Fitting changes the amount of work, not the bytes that travel.

    Attributes:
        rows: tokens per rank in the key gather; the width of the concurrent projection is fitted.
        width: width of a key.
        tokens: tokens per rank in a ring; the length of their sequences is fitted.
        rounds: measurement rounds; a round runs every variant once.
        fits: maximum number of fitting steps, including measurements repeated because their ratio was outside
            :data:`ALLOWED`.
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
        together: transfers that overlap with the work.
        alone: the transfers only.
        work: all of the work, without transfers.
        cover: seconds of the last ``work`` call that can hide transfers; default: all of it.
        prepare: untimed function called before every run, with the variant's name.
    """

    together: Callable[[], object]
    alone: Callable[[], object]
    work: Callable[[], object]
    cover: Callable[[], float] | None = None
    prepare: Callable[[str], object] | None = None


def run(link: str, quick: bool) -> Metrics:
    """Return the cell's entries."""
    with LinkBed(2, link, wide=True) as bed:
        figures = bed.run("benchmarks.context_parallel.hiding:measure", sizes=QUICK if quick else Sizes())[0]
    print(f"hiding: {figures}", file=sys.stderr, flush=True)
    return {
        "hidden_fraction": {name: each["hidden"] for name, each in figures.items()},
        "hiding": figures,
    }


def measure(sizes: Sizes) -> dict[str, Any]:
    """Return figures by algorithm and direction, the same on all ranks."""
    figures = {}
    for direction in ("forward", "backward"):
        back = direction == "backward"
        problems = {"key gather": partial(gathering, sizes, backward=back)}
        for name, of in (("latents", latents), ("grouped keys", grouped)):
            problems[f"ring of {name}"] = partial(going_around, of, sizes.tokens, backward=back)
        for name, problem in problems.items():
            begin = _BEGIN[name.removeprefix("ring of ")][back]
            figures[f"{name}, {direction}"] = fitted(problem, begin, sizes)
    return figures


def fitted(build: Callable[[int], Problem], size: int, sizes: Sizes) -> dict[str, Any]:
    """Fit a problem until its transfers take as long as the covering work; return its figures.

    Args:
        build: function from a size to a problem; a larger size makes transfers a smaller part of the work.
        size: initial size.
        sizes: sizes of the measurement.
    """
    tried: dict[int, float] = {}
    for number in range(sizes.fits):
        if size not in tried:
            times = timed(build(size), min(2, sizes.rounds), ("alone", "work"))
            tried[size] = times["alone"] / times["cover"]
        following = next_size(tried)
        if following in tried or number == sizes.fits - 1:
            # On a logarithmic scale half as long is as far off as twice as long.
            size = min(tried, key=lambda one: abs(log(tried[one] / _AIM)))
            times = timed(build(size), sizes.rounds, ("together", "alone", "work"))
            tried.pop(size, None)  # keep the latest measurement in last place
            tried[size] = times["alone"] / times["cover"]
            if ALLOWED[0] <= tried[size] <= ALLOWED[1] or number == sizes.fits - 1:
                break
            following = next_size(tried)
        size = following
    ratio = tried[size]
    # Without overlap the times would add up; the difference to that sum is hidden.
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
    """Return the next size to try, or a tried size if no other would be closer.

    Args:
        tried: dict from size to transfer time over covering time, which falls as the size grows.
    """
    last = next(reversed(tried))
    if _CLOSE[0] <= tried[last] <= _CLOSE[1]:
        return last
    short = max((size for size, ratio in tried.items() if ratio > _AIM), default=None)
    long = min((size for size, ratio in tried.items() if ratio <= _AIM), default=None)
    if short is None or long is None or short >= long:
        # Not bracketed yet: scale by the ratio, at most threefold.
        estimate = last * min(3.0, max(1 / 3, tried[last] / _AIM))
    else:
        # Interpolate on a log-log scale between a size that is too small and one that is too large.
        part = log(tried[short] / _AIM) / log(tried[short] / tried[long])
        estimate = short * (long / short) ** part
    return max(_STEP, round(estimate / _STEP) * _STEP)


def timed(problem: Problem, rounds: int, names: Sequence[str]) -> dict[str, float]:
    """Return the least seconds of each variant over alternating rounds, and of the covering work."""
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
    """Gather keys during a projection to ``width``; backward: reduce gradients during its backward."""
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
"""Query, and the payload that travels around the ring."""


def latents(rows: int, batch: int) -> Around:
    """Build latent attention of DeepSeek-V3.2's widths."""
    # One head: more heads would take longer than the transfers.
    weight = torch.randn(128 + 128, 512).div_(16).requires_grad_()
    payload = torch.randn(rows, batch, 1, 576, requires_grad=True)
    query = torch.randn(rows, batch, 1, 192, requires_grad=True)
    return query, Payload(payload, FromLatents(1, 512, 128), (weight,))


def grouped(rows: int, batch: int) -> Around:
    """Build attention with four query heads that share two keys."""
    key, value = (torch.randn(rows, batch, 2, 128, requires_grad=True) for _ in range(2))
    return torch.randn(rows, batch, 4, 128, requires_grad=True), Payload.of(key, value)


def going_around(of: Callable[[int, int], Around], tokens: int, rows: int, *, backward: bool) -> Problem:
    """Build ring attention."""
    query, payload = of(rows, max(1, tokens // rows))
    # On two ranks the local block, half of the work, hides the transfer of the remote block.
    block = payload.rows.detach().contiguous()
    gradient, made = torch.randn(*query.shape[:3], _value_dim(payload)), {}
    covers: list[float] = []

    def attend() -> None:
        made["out"] = ring.ring_attention(DenseAttention(0.1), query, payload, dist.group.WORLD)

    def transfer() -> None:
        for _ in range(2 if backward else 1):  # in backward, the gradient's sums follow
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
    """Replace the ring's transfers by local tensors: the work stays the same, the results do not.

    Args:
        covers: list that gets the seconds between the start of each transfer and the wait for it.
    """

    class Here:
        def __init__(self, tensor: Tensor, *unused: Any) -> None:
            self._arrived, self._since = buffer_pool.take(tensor), time.perf_counter()

        def wait(self) -> Tensor:
            covers.append(time.perf_counter() - self._since)
            return self._arrived

    with mock.patch.object(ring, "pass_on", Here):
        yield
