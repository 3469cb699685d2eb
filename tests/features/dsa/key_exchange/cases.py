"""What runs inside the pool's workers: layers that see many lengths of sequences."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.features.attention.context_parallel.dense import DenseAttention
from mindspeed_dsa.features.attention.context_parallel.head_exchange import HeadExchange
from mindspeed_dsa.features.attention.context_parallel.payload import FromLatents, Payload
from mindspeed_dsa.features.dsa.key_exchange.exchange import KeyExchange

LAYERS, HEADS, LATENT, ROPE, PLAIN = 2, 2, 4, 2, 3
FIRST, STEP, FEW, MANY = 480, 8, 20, 60
"""Rows of the first sequence, by how many each is longer, and how many of them there are."""

Layer = Callable[[Tensor], Tensor]
"""This rank's rows ``[rows, 1, width]`` to what depends on the rows of all."""


def many_lengths(kind: str) -> dict[str, Any]:
    """Forward and backward of layers with one length after the other.

    Returns:
        ``bytes`` of all integer tensors that live after :data:`FEW` and after :data:`MANY` lengths, and
        ``late``, the largest relative error of the first one's gradient if its backward runs after all
        others.
    """
    layers = [_layer(kind) for _ in range(LAYERS)]
    found = []
    pending = _forward(layers, FIRST)
    for number in range(1, MANY + 1):
        _backward(*_forward(layers, FIRST + number * STEP))
        if number in (FEW, MANY):
            found.append(_held())
    late = _backward(*pending)
    again = _backward(*_forward(layers, FIRST))
    return {"bytes": found, "late": float((late - again).abs().max() / again.abs().max())}


def _layer(kind: str) -> Layer:
    world = dist.group.WORLD
    if kind == "heads":
        heads = HeadExchange(world)

        def attend(rows: Tensor) -> Tensor:
            payload = Payload(rows[:, :, None], FromLatents(HEADS, LATENT, PLAIN), (_weight(),))
            query = rows.new_ones(rows.size(0), 1, HEADS, PLAIN + ROPE)
            return heads.attend_payload(DenseAttention(0.3), query, payload)

        return attend
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    exchange = KeyExchange(world, 2 if "blocks" in kind else 0, alone, None, keeps=False)
    if kind == "ends":
        return lambda rows: rows * exchange.ends(rows.size(0), rows.device)[:, None, None]
    return lambda rows: exchange.gather(rows).wait().square()


def _weight() -> Tensor:
    return torch.linspace(-1, 1, HEADS * 2 * PLAIN * LATENT, dtype=torch.float64).view(-1, LATENT)


def _forward(layers: list[Layer], length: int) -> tuple[Tensor, Tensor]:
    rows = torch.linspace(-1, 1, length // 2 * (LATENT + ROPE), dtype=torch.float64)
    local = rows.view(-1, 1, LATENT + ROPE).requires_grad_()
    outs = [layer(local) for layer in layers]
    return local, sum((out * torch.arange(out.numel()).view_as(out)).sum() for out in outs)


def _backward(local: Tensor, loss: Tensor) -> Tensor:
    loss.backward()
    assert local.grad is not None
    return local.grad


def _held() -> int:
    gc.collect()
    tensors = (one for one in gc.get_objects() if type(one) is Tensor and not one.is_floating_point())
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())
