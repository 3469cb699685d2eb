"""Worker functions: output projections in pieces, and after one all-to-all of all rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_dsa.features.attention.sp_tp_sp import pieces
from mindspeed_dsa.features.attention.sp_tp_sp.layers import OutputProjection, WholeLinear
from mindspeed_dsa.parallel.all_to_all import start
from mindspeed_dsa.parallel.weight_gradients import Queued, queue_gradients
from tests.support import moe

HIDDEN, WIDTH = 40, 24
"""Width of hidden states, and width of a rank's heads together."""


def beside_whole(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return outputs, gradients and events of each run, in pieces and after one all-to-all."""
    return [{"ours": _run(OutputProjection, **run), "theirs": _run(_Behind, **run)} for run in runs]


class _Behind(OutputProjection):
    """Output projection that waits for all rows of all heads."""

    def forward(self, heads: Tensor) -> tuple[Tensor, Tensor | None]:
        arrived = start(heads, None, None, self.group).wait().unflatten(0, (self.group.size(), -1))
        return WholeLinear.forward(self, arrived.movedim(0, 2).flatten(2))


def _run(
    kind: Any,
    rows: int,
    batch: int = 1,
    pieces_wanted: int = 4,
    dtype: str = "float32",
    frozen: bool = False,
    first: bool = False,
    queued: bool = False,
    bias: bool = False,
    graph: bool = True,
) -> dict[str, Any]:
    """Run two microbatches forward, then backward.

    Args:
        kind: class of the projection.
        rows: number of rows of this rank.
        batch: number of sequences.
        pieces_wanted: number of pieces.
        dtype: dtype of all tensors.
        frozen: whether the weight is frozen.
        first: whether the heads need no gradient, as in a first layer.
        queued: whether the weight gradient is computed after backward.
        bias: whether the projection adds its bias.
        graph: whether backward runs, too.
    """
    config = SimpleNamespace(
        params_dtype=getattr(torch, dtype),
        use_cpu_initialization=True,
        perform_initialization=True,
        sequence_parallel=True,
    )
    # Weights are equal on all ranks, heads differ.
    noise, ranks = torch.Generator().manual_seed(7), dist.get_world_size()

    def fill(tensor: Tensor) -> None:
        tensor.copy_(torch.randn(tensor.shape, generator=noise) / 8)

    layer = kind(ranks * WIDTH, HIDDEN, config=config, init_method=fill, bias=bias, skip_bias_add=not bias)
    layer.group = dist.group.WORLD
    layer.weight.requires_grad_(not frozen)
    if bias:
        torch.nn.init.constant_(layer.bias, 0.5)
    mine = torch.Generator().manual_seed(dist.get_rank())
    shape = (ranks * rows, batch, WIDTH)
    heads = [
        torch.randn(shape, generator=mine).to(config.params_dtype).requires_grad_(not first) for _ in range(2)
    ]
    queue: list[Queued] = []
    with (
        _events() as events,
        mock.patch.multiple(pieces, MOST_PIECES=pieces_wanted, LEAST_TOKENS=1),
        torch.set_grad_enabled(graph),
    ):
        # As under pipeline schedules that compute weight gradients later.
        with queue_gradients([layer.weight], queue) if queued else contextlib.nullcontext():
            outputs = [layer(item)[0] for item in heads]
        results: dict[str, Any] = {"forward": list(events)}
        events.clear()
        if graph and (not frozen or not first):
            sum((output.float() ** 2).sum() for output in outputs).backward()
        results["backward"] = list(events)
    left = [item.gradient() for item in queue]
    if left:
        assert layer.weight.grad is None
        # The order of additions in backward, so that sums have the same bits.
        layer.weight.grad = sum(reversed(left))
    gradients = [*(item.grad for item in heads), *(item.grad for item in layer.parameters())]
    results["values"] = [*(output.detach() for output in outputs), *gradients]
    return results


class _Products(TorchDispatchMode):
    """Records matrix products among other events."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self._events.append("product")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _events() -> Iterator[list[str]]:
    """Record launches and waits of transfers, and matrix products."""
    with moe.transfers() as events, _Products(events):
        yield events
