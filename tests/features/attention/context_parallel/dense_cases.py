"""Comparison of ring attention, head exchange and both with attention in one piece."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.context_parallel.layout import Layout, Zigzag, split
from mindspeed_dsa.context_parallel.packs import BalancedBlocks, DocumentZigzag, Pack
from mindspeed_dsa.features.attention.context_parallel.dense import DenseAttention, FromLatents, Payload
from mindspeed_dsa.features.attention.context_parallel.head_exchange import HeadExchange
from mindspeed_dsa.features.attention.context_parallel.ring import PackedRows, PayloadStrategy, Ring
from tests.ops import dense_cases

BATCH, HEADS, LATENT, PLAIN, ROPE, VALUE = 2, 8, 10, 6, 4, 5
SCALE = 0.4


def strategy(algorithm: str) -> PayloadStrategy:
    """Return the strategy ``p2p``, ``a2a`` or ``a2a+p2p`` over all ranks; the last exchanges heads in
    pairs.
    """
    world = dist.group.WORLD
    if algorithm == "p2p":
        return Ring(world)
    if algorithm == "a2a":
        return HeadExchange(world)
    ranks = range(dist.get_world_size())
    # Neighbours exchange heads; ranks with the same place in their pair form a ring.
    pairs = [dist.new_group(list(ranks[first : first + 2])) for first in ranks[::2]]
    across = [dist.new_group(list(ranks[first::2])) for first in (0, 1)]
    rank = dist.get_rank()
    return HeadExchange(world, pairs[rank // 2], across[rank % 2])


def drawn(length: int, dtype: str, latent: bool, kv_heads: int) -> list[Tensor]:
    """Return query and output gradient, then keys and values, or latents and the up-projection's weight."""
    generator, kind = torch.Generator().manual_seed(0), getattr(torch, dtype)

    def states(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(kind)

    tensors = [states(length, BATCH, HEADS, PLAIN + ROPE), states(length, BATCH, HEADS, VALUE)]
    if latent:
        weight = states(HEADS * (PLAIN + VALUE), LATENT)
        return [*tensors, states(length, BATCH, 1, LATENT + ROPE), weight]
    return [*tensors, states(length, BATCH, kv_heads, PLAIN + ROPE), states(length, BATCH, kv_heads, VALUE)]


PACK = Pack(((0, 7), (8, 9), (10, 41), (41, 43)), 48)
"""Documents with padding between and after them."""
CUT = Pack(((0, 13), (16, 32), (40, 47)), 48)
"""Documents padded to 16, 24 and 8 rows, which two chunks for each of four ranks divide."""


def packed_rows(packed: str, ranks: int) -> PackedRows | None:
    """Return packed rows balanced by work (``dealt``) or cut by document (``cut``)."""
    if packed == "dealt":
        # Blocks of three rows, dealt by work.
        return PackedRows(PACK, BalancedBlocks(ranks, PACK, 3))
    return PackedRows(CUT, DocumentZigzag(ranks, ((0, 16), (16, 40), (40, 48)))) if packed == "cut" else None


def compared(
    algorithm: str,
    length: int,
    dtype: str = "float64",
    latent: bool = False,
    kv_heads: int = HEADS,
    packed: str = "",
) -> dict[str, float]:
    """Return errors of a rank's output and gradients, relative to the largest entry of the expected
    tensor.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    query, grad, *others = drawn(length, dtype, latent, kv_heads)
    leaves = [one.double().requires_grad_() for one in (query, *others)]
    rows = packed_rows(packed, ranks)
    wide = attended_to_in_one_piece(leaves, latent, None if rows is None else rows.pack)
    wanted = [wide, *torch.autograd.grad(wide, leaves, grad.double())]

    layout: Layout = Zigzag(ranks) if rows is None else rows.layout
    # This rank's rows; the up-projection's weight is the same on all ranks.
    mine = [split(one, layout, rank, 0).requires_grad_() for one in (query, *others[: 1 if latent else 2])]
    weights = [others[1].requires_grad_()] if latent else []
    inner, exchange = DenseAttention(SCALE), strategy(algorithm)
    with no_memory_of_others():
        if latent:
            payload = Payload(mine[1], FromLatents(HEADS, LATENT, PLAIN), (weights[0],))
        else:
            payload = Payload.of(*mine[1:])
        out = exchange.attend_payload(inner, mine[0], payload, rows)
        results = [out, *torch.autograd.grad(out, [*mine, *weights], split(grad, layout, rank, 0))]
    for gradient in results[len(mine) + 1 :]:
        dist.all_reduce(gradient)  # data parallelism sums weight gradients like this
    # Weight gradients are complete, all other tensors are cut.
    right = [split(one, layout, rank, 0) for one in wanted[: len(mine) + 1]] + wanted[len(mine) + 1 :]
    names = ("out", "query", *(("latents", "weight") if latent else ("key", "value")))
    return {
        name: float((one.double() - other).abs().max() / other.abs().max())
        for name, one, other in zip(names, results, right, strict=True)
    }


def attended_to_in_one_piece(leaves: list[Tensor], latent: bool, pack: Pack | None) -> Tensor:
    query, key, value = leaves
    if latent:
        # The up-projection of all heads, as Megatron computes it.
        up = torch.einsum("sbc,oc->sbo", key[..., 0, :LATENT], value).unflatten(-1, (HEADS, -1))
        rotary = key[..., LATENT:].expand(-1, -1, HEADS, -1)
        key, value = torch.cat([up[..., :PLAIN], rotary], -1), up[..., PLAIN:]
    if pack is not None:
        heads = query.size(2) // key.size(2)
        key, value = (one.repeat_interleave(heads, dim=2) for one in (key, value))
        position, starts, ends = torch.arange(pack.length), pack.starts[:, None], pack.ends[:, None]
        sees = (position >= starts) & (position < ends)  # [rows, keys]
        scores = torch.einsum("sbhd,tbhd->bhst", query, key) * SCALE
        # Padding rows see no key: NaN becomes zero.
        likely = scores.masked_fill(~sees, -torch.inf).softmax(-1).masked_fill(~sees, 0)
        return torch.einsum("bhst,tbhd->sbhd", likely, value)
    batch_first = (one.transpose(0, 1) for one in (query, key, value))
    return dense_cases.whole(*batch_first, scale=SCALE).transpose(0, 1)


@contextlib.contextmanager
def no_memory_of_others() -> Iterator[None]:
    """Fill fresh memory with NaN, so that a read before a transfer has arrived shows."""
    # Torch fills uninitialized memory with NaN in deterministic mode.
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def events_of_ring() -> dict[str, list[str]]:
    """Return the order of a ring's transfers and attention calls, in forward and in backward."""
    from mindspeed_dsa.features.attention.context_parallel import dense, ring

    events: list[str] = []
    originals = ring.pass_on, dense.dense_attention, dense.dense_attention_backward

    class Told:
        def __init__(self, pending: Any, tag: int) -> None:
            self._pending, self._tag = pending, tag

        def wait(self) -> Tensor:
            events.append(f"wait {self._tag}")
            return self._pending.wait()

    def pass_on(tensor: Tensor, group: Any, tag: int, what: str) -> Any:
        events.append(f"send {tag}")
        return Told(originals[0](tensor, group, tag, what), tag)

    def told(function: Any) -> Any:
        def tell(*args: Any, **kwargs: Any) -> Any:
            events.append("attend")
            return function(*args, **kwargs)

        return tell

    # Two key heads for eight query heads; only the order of events matters.
    query, grad, key, value = drawn(24, "float32", latent=False, kv_heads=2)
    layout, rank = Zigzag(dist.get_world_size()), dist.get_rank()
    mine = [split(one, layout, rank, 0).requires_grad_() for one in (query, key, value)]
    ring.pass_on = pass_on
    dense.dense_attention, dense.dense_attention_backward = told(originals[1]), told(originals[2])
    try:
        out = Ring(dist.group.WORLD).attend(DenseAttention(SCALE), *mine)
        forward, events[:] = list(events), []
        out.backward(split(grad, layout, rank, 0))
    finally:
        ring.pass_on, dense.dense_attention, dense.dense_attention_backward = originals
    return {"forward": forward, "backward": events}
