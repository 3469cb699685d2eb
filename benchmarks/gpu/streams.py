"""Work of a DeepSeek-V3.2 layer on one stream and on two, by the number of tokens.

Shows from which size on ``--two-streams`` pays for its waits: ``LEAST_TOKENS`` in the library.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa import platforms
from mindspeed_dsa.megatron import second_stream

TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)
QUICK = (16,)
_ROUNDS, _CALLS = 9, 20
_TOPK = 8


@dataclass(frozen=True)
class Sizes:
    """Widths of a DeepSeek-V3.2 layer.

    Attributes:
        latents: output width of both down-projections.
        index: width of the indexer's key, plus a weight for each of its heads.
        shared: inner width of the shared expert.
        query: query width of one of eight tensor parallel ranks.
    """

    hidden: int = 7168
    latent_query: int = 1536
    latents: int = 1536 + 512 + 64
    index: int = 128 + 64
    shared: int = 2048
    experts: int = 256
    query: int = 16 * 192


SMALL = Sizes(hidden=64, latent_query=16, latents=32, index=8, shared=32, experts=8, query=32)

Work = Callable[[], tuple[Tensor, ...]]


def run(
    quick: bool = False, tell: Callable[[Any], None] = lambda found: None, rounds: int = _ROUNDS
) -> dict[str, Any]:
    """Return milliseconds on one stream and on two by part and tokens; ``refused`` if bits differ.

    Args:
        quick: a tiny layer.
        tell: callback that gets the figures so far.
        rounds: rounds of both variants in alternation; the median counts.
    """
    figures: dict[str, Any] = {}
    for tokens in QUICK if quick else TOKENS:
        for name, (first, second, states) in _parts(SMALL if quick else Sizes(), tokens).items():
            figures[f"{name}, {tokens} tokens"] = _compared(first, second, states, rounds)
        tell(figures)
    return figures


def _parts(sizes: Sizes, tokens: int) -> dict[str, tuple[Work, Work, Tensor]]:
    """Return by part the work of the first stream, the work of the second, and the second one's input."""
    device = platforms.current().device
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        numbers = torch.randn(*shape, generator=generator) / shape[-1] ** 0.5
        return numbers.to(device, torch.bfloat16)

    rows, latent = drawn(tokens, sizes.hidden), drawn(tokens, sizes.latent_query)
    down, index = drawn(sizes.latents, sizes.hidden), drawn(sizes.index, sizes.hidden)
    router, up = drawn(sizes.experts, sizes.hidden), drawn(sizes.query, sizes.latent_query)
    fc1, fc2 = drawn(2 * sizes.shared, sizes.hidden), drawn(sizes.hidden, sizes.shared)
    order = torch.randint(tokens, (tokens * min(_TOPK, sizes.experts),), generator=generator).to(device)

    def permute() -> tuple[Tensor, ...]:
        return (rows.index_select(0, order),)

    def route() -> tuple[Tensor, ...]:
        probs = (rows @ router.t()).float().softmax(-1)
        return (*probs.topk(min(_TOPK, sizes.experts)), *permute())

    def shared_expert() -> tuple[Tensor, ...]:
        gate, value = (rows @ fc1.t()).chunk(2, -1)
        return ((torch.nn.functional.silu(gate) * value) @ fc2.t(),)

    return {
        "indexer's projections": (lambda: (rows @ down.t(),), lambda: (rows @ index.t(),), rows),
        "shared expert": (route, shared_expert, rows),
        "permutation": (lambda: (latent @ up.t(),), permute, rows),
    }


def _compared(first: Work, second: Work, states: Tensor, rounds: int) -> dict[str, Any]:
    def in_turns() -> tuple[Tensor, ...]:
        return (*second(), *first())

    def beside() -> tuple[Tensor, ...]:
        started = second_stream.start(second, states)
        own = first()
        return (*started.wait(), *own)

    ways = {"in turns": in_turns, "beside": beside}
    expected, actual = (way() for way in ways.values())
    platforms.current().synchronize()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            seconds[name].append(_seconds(way))
    figures: dict[str, Any] = {name: statistics.median(each) * 1e3 for name, each in seconds.items()}
    figures["ratio"] = figures["beside"] / figures["in turns"]
    if not all(map(torch.equal, expected, actual)):
        return {**figures, "refused": "two streams have other bits than one"}
    return figures


def _seconds(way: Work) -> float:
    """Return the seconds of one call, averaged over calls launched without waiting."""
    platforms.current().synchronize()
    begun = time.perf_counter()
    for _ in range(_CALLS):
        way()
    platforms.current().synchronize()
    return (time.perf_counter() - begun) / _CALLS


def least_tokens(found: dict[str, Any], names: Sequence[str] = ("indexer's projections",)) -> int | None:
    """Return the number of tokens from which on two streams are never slower for these parts, or None."""
    least = None
    for tokens in sorted(TOKENS, reverse=True):
        rows = [found.get(f"{name}, {tokens} tokens") for name in names]
        if any(row is None or row["ratio"] > 1 for row in rows):
            break
        least = tokens
    return least
