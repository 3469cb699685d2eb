"""Bytes that a rank receives, at the collectives and on the link, relative to a formula."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.linkbed import LinkBed
from benchmarks.registry import Metrics
from mindspeed_dsa.context_parallel.gather import GatheredRows, Members, freed_until_backward
from mindspeed_dsa.context_parallel.layout import Zigzag
from mindspeed_dsa.features.attention.context_parallel.dense import DenseAttention, FromLatents, Payload
from mindspeed_dsa.features.attention.context_parallel.head_exchange import HeadExchange
from mindspeed_dsa.features.attention.context_parallel.ring import Ring

_DEVICE = Path("/sys/class/net/slow0/statistics/rx_bytes")
FLOAT = 4  # bytes of a number here, and of a gradient anywhere


@dataclass(frozen=True)
class Sizes:
    """Widths of DeepSeek-V3.2's keys; few heads, because only the head exchange sends them.

    Attributes:
        length: whole sequence's length.
        heads: number of query heads.
        kv_heads: number of grouped key heads.
        dim: width of a grouped head.
    """

    length: int = 8192
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    latent: int = 512
    rope: int = 64
    index: int = 128
    plain: int = 128


QUICK = Sizes(length=256)


def run(link: str, quick: bool) -> Metrics:
    """Return the cell's entries."""
    with LinkBed(2, link) as bed:
        found = bed.run("benchmarks.context_parallel.volume:measure", sizes=QUICK if quick else Sizes())[0]
    return {"comm_bytes_ratio_to_formula": found}


def measure(sizes: Sizes) -> dict[str, Any]:
    """Return this rank's bytes over the formula's bytes, by algorithm and direction."""
    ratios: dict[str, Any] = {}
    for name, (forward, formulas) in cases(sizes).items():
        with counted() as received:
            out = forward()
        with counted() as received_back:
            out.backward(torch.ones_like(out))
        for direction, counts, bytes_ in zip(
            ("forward", "backward"), (received, received_back), formulas, strict=True
        ):
            ratios.setdefault(name, {})[direction] = {
                "collective": counts["collective"] / bytes_,
                "link": counts["link"] / bytes_,
                "megabytes": bytes_ / 1e6,
            }
    return ratios


def cases(sizes: Sizes) -> dict[str, tuple[Callable[[], Tensor], tuple[float, float]]]:
    """Return forwards whose output has a graph, and the formula's bytes ``S f n b`` of both directions.

    ``S`` is the sequence's length, ``f = (c - 1) / c`` for ``c`` ranks, ``n`` the numbers per token and ``b``
    their bytes. A head exchange sends ``S / c`` rows.
    """
    group = dist.group.WORLD
    ranks = dist.get_world_size()
    rows, share = sizes.length // ranks, (ranks - 1) / ranks
    key = sizes.latent + sizes.rope
    members = Members.of(group, Zigzag(ranks), sizes.length)
    inner = DenseAttention(1.0, "auto")

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, requires_grad=True)

    def keys(keep: bool) -> Callable[[], Tensor]:
        def forward() -> Tensor:
            gathered = [
                GatheredRows(random(rows, 1, width), members, is_freed=not keep)
                for width in (key, sizes.index)
            ]
            # Backward needs the rows, as that of attention does: otherwise they are not gathered again.
            first, second = (one.wait().square().sum(-1, keepdim=True) for one in gathered)
            out = first * second
            return out if keep else freed_until_backward(out, gathered)

        return forward

    def latent(strategy: Any) -> Callable[[], Tensor]:
        def forward() -> Tensor:
            query = random(rows, 1, sizes.heads, sizes.plain + sizes.rope)
            expansion = FromLatents(sizes.heads, sizes.latent, sizes.plain)
            weight = random(sizes.heads * 2 * sizes.plain, sizes.latent)
            payload = Payload(random(rows, 1, 1, key), expansion, (weight,))
            return strategy.attend_payload(inner, query, payload)

        return forward

    def grouped(strategy: Any) -> Callable[[], Tensor]:
        def forward() -> Tensor:
            query = random(rows, 1, sizes.heads, sizes.dim)
            states = (random(rows, 1, sizes.kv_heads, sizes.dim) for _ in range(2))
            return strategy.attend(inner, query, *states)

        return forward

    whole = sizes.length * share * FLOAT
    gathered = whole * (key + sizes.index)
    heads = rows * share * FLOAT * sizes.heads * (sizes.plain + sizes.rope + sizes.plain)
    pair = whole * 2 * sizes.kv_heads * sizes.dim
    exchanged = rows * share * FLOAT * 2 * (sizes.heads + sizes.kv_heads) * sizes.dim
    return {
        # Freed keys are gathered again in backward, before their gradients are reduced.
        "DSA, keys gathered": (keys(keep=False), (gathered, 2 * gathered)),
        "DSA, keys gathered and kept": (keys(keep=True), (gathered, gathered)),
        # In backward a ring passes on the keys and the sums of their gradients.
        "MLA, ring of latents": (latent(Ring(group)), (whole * key, 2 * whole * key)),
        "MLA, heads exchanged": (latent(HeadExchange(group)), (whole * key + heads, whole * key + heads)),
        "GQA, ring": (grouped(Ring(group)), (pair, 2 * pair)),
        "GQA, heads exchanged": (grouped(HeadExchange(group)), (exchanged, exchanged)),
    }


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count the bytes that this rank receives in the block, by the collectives' arguments and by the link."""
    bytes_received = {"collective": 0, "link": 0}

    def counting(original: Callable[..., Any], size: Callable[..., int]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            bytes_received["collective"] += size(*args)
            return original(*args, **kwargs)

        return call

    ranks = dist.get_world_size()
    sizes: dict[str, Callable[..., int]] = {
        "all_gather": lambda outputs, part, *unused: (len(outputs) - 1) * part.nbytes,
        "all_gather_into_tensor": lambda whole, part, *unused: whole.nbytes - part.nbytes,
        "all_to_all_single": _without_own,
        "all_reduce": lambda tensor, *unused: 2 * tensor.nbytes * (ranks - 1) // ranks,
        "batch_isend_irecv": lambda operations: sum(
            each.tensor.nbytes for each in operations if each.op is dist.irecv
        ),
    }
    dist.barrier()
    before = int(_DEVICE.read_text())
    with contextlib.ExitStack() as stack:
        for name, size in sizes.items():
            stack.enter_context(mock.patch.object(dist, name, counting(getattr(dist, name), size)))
        yield bytes_received
    dist.barrier()
    bytes_received["link"] = int(_DEVICE.read_text()) - before


def _without_own(output: Tensor, rows: Tensor, receive: Any = None, send: Any = None, *unused: Any) -> int:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    own = output.size(0) // ranks if receive is None else receive[rank]
    return output.nbytes - own * (output.nbytes // max(output.size(0), 1))
