"""State that layers share in a key exchange is bounded, and keeps no process group alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.context_parallel.gather import Members
from mindspeed_dsa.context_parallel.key_exchange import KeyExchange
from mindspeed_dsa.context_parallel.layout import Zigzag
from mindspeed_dsa.features.attention.context_parallel.dense import DenseAttention, FromLatents, Payload
from mindspeed_dsa.features.attention.context_parallel.head_exchange import HeadExchange, SharedMembers
from mindspeed_dsa.features.dsa.key_exchange.exchange import groups_of
from mindspeed_dsa.parallel import saved_tensors

# -- functions that run in the pool's workers ------------------------------------------------------


LAYERS, HEADS, LATENT, ROPE, PLAIN = 2, 2, 4, 2, 3
FIRST, STEP, FEW, MANY = 480, 8, 20, 60
"""Length of the first sequence, increment per sequence, and the two numbers of sequences."""

Layer = Callable[[Tensor], Tensor]
"""Function from this rank's rows ``[rows, 1, width]`` to a tensor that depends on all ranks' rows."""


def many_lengths(kind: str) -> dict[str, Any]:
    """Run forward and backward of layers on sequences of increasing length.

    Returns:
        ``bytes``: size of all live integer tensors after :data:`FEW` and after :data:`MANY` lengths.
        ``late``: largest relative error of the first length's gradient, if its backward runs last.
    """
    layers = [_layer(kind) for _ in range(LAYERS)]
    held = []
    pending = _forward(layers, FIRST)
    for number in range(1, MANY + 1):
        _backward(*_forward(layers, FIRST + number * STEP))
        if number in (FEW, MANY):
            held.append(_held())
    late = _backward(*pending)
    again = _backward(*_forward(layers, FIRST))
    return {"bytes": held, "late": float((late - again).abs().max() / again.abs().max())}


def _layer(kind: str) -> Layer:
    world = dist.group.WORLD
    if kind == "heads":
        heads = HeadExchange(world)

        def attend(rows: Tensor) -> Tensor:
            payload = Payload(rows[:, :, None], FromLatents(HEADS, LATENT, PLAIN), (_weight(),))
            query = rows.new_ones(rows.size(0), 1, HEADS, PLAIN + ROPE)
            return heads.attend_payload(DenseAttention(0.3), query, payload)

        return attend
    exchange = KeyExchange(world, Zigzag(2, 2 if "blocks" in kind else 0))
    if kind == "ends":
        return lambda rows: rows * exchange.ends(rows.size(0), rows.device)[:, None, None]
    return lambda rows: exchange.gather(rows).wait().square()


def saved_rows(keeps: bool) -> dict[str, Any]:
    """Return which tensors autograd saves that swapping must leave alone, and the gradient."""
    exchange = KeyExchange(dist.group.WORLD, Zigzag(2), keeps=keeps)
    local = torch.linspace(-1, 1, 16).view(8, 1, 2).requires_grad_()
    are_freed = []

    def pack(saved: Tensor) -> Tensor:
        are_freed.append(saved_tensors.is_freed(saved.untyped_storage()))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        gathered = exchange.gather(local)
        out = exchange.free(gathered.wait().square(), [gathered])
    out.sum().backward()
    return {"are_freed": are_freed, "gradient": local.grad}


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


CASES = "tests.features.dsa.key_exchange.test_exchange"


class Group:
    def rank(self):
        return 0

    def size(self):
        return 2


def of_length(group, length):
    return Members.of(group, Zigzag(2), length)


@pytest.mark.parametrize(
    ("share", "key"), [(of_length, 24), (SharedMembers().of_order, torch.arange(8))], ids=["keys", "heads"]
)
def test_layers_share_rows_and_hold_no_group(share, key):
    group, other = Group(), Group()
    first = share(group, key)
    assert share(group, key).held is first.held
    assert share(other, key) is not first
    gone = weakref.ref(group)
    del group, first
    gc.collect()
    assert gone() is None


def test_swapping_leaves_rows_alone_that_are_gathered_again(pool):
    """Swapped rows would move to the host, and be gathered again all the same."""
    freed, kept = (pool.run(f"{CASES}:saved_rows", 2, keeps=keeps) for keeps in (False, True))
    for again, once in zip(freed, kept, strict=True):
        assert (again["are_freed"], once["are_freed"]) == ([True], [False])
        assert again["gradient"].equal(once["gradient"])


@pytest.mark.parametrize(
    "kind",
    ["keys", *(pytest.param(each, marks=pytest.mark.full) for each in ("keys of blocks", "heads")), "ends"],
)
def test_lengths_that_come_and_go_leave_no_memory(pool, kind):
    """Live memory covers a few lengths, and a forward in flight still gets its gradient."""
    # Without a bound, 40 lengths of about 800 rows held 128 KB of range ends and 512 KB of gathered rows.
    for held in pool.run(f"{CASES}:many_lengths", 2, kind=kind):
        few, many = held["bytes"]
        assert few > 0
        assert many - few < 100_000
        assert held["late"] <= 1e-12


def test_an_attention_with_groups_of_its_own_is_not_asked_for_its_indexers() -> None:
    # Dense stages since release 0.19 have a placeholder indexer without process groups.
    groups, others = object(), object()
    without = SimpleNamespace()
    assert groups_of(SimpleNamespace(pg_collection=groups, indexer=without)) is groups
    assert groups_of(SimpleNamespace(pg_collection=groups, indexer=None)) is groups
    assert groups_of(SimpleNamespace(indexer=SimpleNamespace(pg_collection=others))) is others
