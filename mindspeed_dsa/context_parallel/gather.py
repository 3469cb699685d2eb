"""Asynchronous all-gather of tokens in sequence order, overlapped with other work in forward and backward.

A gather has two autograd nodes. In forward, the first node starts the all-gather and the second waits for it.
In backward, the second node starts the reduce-scatter of the gradient and the first waits for it. Autograd
runs nodes in the reverse order of their creation, so the work between the two nodes overlaps with both
transfers.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed_dsa.context_parallel.layout import Layout, rows_of_all
from mindspeed_dsa.context_parallel.strategy import ContextParallelStrategy, Exchanged
from mindspeed_dsa.ops.precision import wide
from mindspeed_dsa.parallel import buffer_pool, saved_tensors
from mindspeed_dsa.parallel.collectives import reduce_scatter_tensor
from mindspeed_dsa.parallel.names import named
from mindspeed_dsa.parallel.transfers import exchange_pairs


class HeldRows:
    """Sequence positions of the tokens on each rank of a group. Has no reference to the process group.

    Args:
        rows: sequence positions of each rank's tokens, in the rank's order, int64 ``[members, rows]`` on the
            CPU.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self._parts: dict[tuple[int, int], HeldRows] = {}
        self._on_device: dict[torch.device, Tensor] = {}

    def part(self, index: int, step: int) -> HeldRows:
        """Return the positions of every ``step``-th member, starting at member ``index``."""
        if (index, step) not in self._parts:
            self._parts[index, step] = HeldRows(self.rows[index::step])
        return self._parts[index, step]

    def on(self, device: torch.device) -> Tensor:
        """Return :attr:`rows` flattened, on a device; cached per device."""
        if device not in self._on_device:
            self._on_device[device] = self.rows.flatten().to(device)
        return self._on_device[device]

    @cached_property
    def runs(self) -> list[list[int]]:
        """First positions of the members' runs, ``[run][member]``.

        A run is a range of consecutive positions. The list is empty unless every member has one run, or two
        runs of equal length.
        """
        members, count = self.rows.shape
        for runs in (1, 2):
            if count % runs:
                break
            by_run = self.rows.view(members, runs, -1)
            begins = by_run[:, :, :1]
            if torch.equal(by_run, begins + torch.arange(count // runs)):
                return begins.squeeze(-1).t().tolist()
        return []


LATEST = 16
"""Number of layouts and lengths whose rows are cached, at 8 bytes per row on host and device. Transfers in
flight keep their own reference."""


@lru_cache(maxsize=LATEST)
@torch.inference_mode(False)  # cached tensors of an evaluation are used in training too
def _held(layout: Layout, length: int, members: int) -> HeldRows:
    """Build the positions, shared by all layers and groups."""
    return HeldRows(rows_of_all(layout, length).view(members, -1))


@dataclass(frozen=True)
class Members:
    """Process group, with the sequence positions of each member's tokens.

    Attributes:
        group: process group.
        held: positions of each member's tokens.
    """

    group: ProcessGroup
    held: HeldRows

    @classmethod
    def of(cls, group: ProcessGroup, layout: Layout, length: int) -> Members:
        """Build for a context parallel group, or for a joint group of context and tensor parallel ranks.

        Args:
            group: process group. In a joint group, consecutive members are tensor parallel ranks, which split
                the tokens of one context parallel rank.
            layout: layout of the context parallel ranks.
            length: number of tokens of the whole sequence.
        """
        return cls(group, _held(layout, length, group.size()))

    @property
    def rows(self) -> Tensor:
        """Positions of all members' tokens; see :class:`HeldRows`."""
        return self.held.rows

    def part(self, group: ProcessGroup, index: int) -> Members:
        """Return the members of this rank's context parallel group, taken from a joint group.

        Args:
            group: context parallel process group of this rank.
            index: tensor parallel rank of this process.
        """
        return Members(group, self.held.part(index, self.group.size() // group.size()))

    def rows_on(self, device: torch.device) -> Tensor:
        """Return the positions on a device; see :meth:`HeldRows.on`."""
        return self.held.on(device)

    @property
    def runs(self) -> list[list[int]]:
        """Runs of consecutive positions; see :attr:`HeldRows.runs`."""
        return self.held.runs

    def parts_of(self, whole: Tensor) -> list[list[Tensor]]:
        """Return each member's runs as views of the whole sequence. :attr:`runs` must not be empty."""
        size = self.rows.size(1) // len(self.runs)
        return [[whole[begin : begin + size] for begin in begins] for begins in zip(*self.runs, strict=True)]


class _Transfer:
    """Buffers and handles of one all-gather, and of the reduce-scatter of its gradient."""

    def __init__(self, members: Members, sums: Members, is_freed: bool) -> None:
        self.members, self.sums, self._is_freed = members, sums, is_freed
        self.local: Tensor | None = None
        self._whole: Tensor | None = None
        self._storage: Callable[[], Any] = lambda: None
        self._by_member: Tensor | None = None
        self._works: list[Any] = []
        self._sum: tuple[Tensor, list[Any], list[Tensor], Tensor] | None = None
        self._is_here = False

    def start(self, local: Tensor) -> None:
        """Start the all-gather of ``local``, ``[rows, ...]``."""
        self.local = local.detach().contiguous()
        self._whole = local.new_empty((self.members.rows.numel(), *local.shape[1:]))
        self._launch()

    def _launch(self) -> None:
        local, whole, group = self.local, self._whole, self.members.group
        assert local is not None
        assert whole is not None
        self._is_here = False
        if not self.members.runs:
            # Without runs, gather by member and reorder in wait().
            self._by_member = buffer_pool.take(whole)
            self._works = [dist.all_gather_into_tensor(self._by_member, local, group=group, async_op=True)]
            return
        parts, own_runs = self.members.parts_of(whole), local.chunk(len(self.members.runs))
        if whole.device.type == "cpu":
            # gloo: each pair exchanges its runs, written straight to their places.
            self._works = exchange_pairs([own_runs] * len(parts), parts, group)
            for view, part in zip(parts[group.rank()], own_runs, strict=True):
                view.copy_(part)
            return
        self._works = [
            dist.all_gather(list(views), part, group=group, async_op=True)
            for views, part in zip(zip(*parts, strict=True), own_runs, strict=True)
        ]

    def wait(self) -> None:
        """Wait until the gathered rows are in place; returns at once if no all-gather is under way."""
        if self._is_here:
            return
        for work in self._works:
            work.wait()
        if self._by_member is not None:
            assert self._whole is not None
            self._whole.index_copy_(0, self.members.rows_on(self._whole.device), self._by_member)
            buffer_pool.give_back(self._by_member)
        self._works, self._by_member, self._is_here = [], None, True

    def hand_out(self) -> Tensor:
        """Wait for the gathered rows and return them; keep only a weak reference to their memory.

        If autograd has not saved the rows, because a checkpoint computes them again, the memory thus ends
        with the forward pass, and :meth:`start_again` has nothing to do.
        """
        self.wait()
        whole, self._whole = self._whole, None
        assert whole is not None
        self._storage = weakref.ref(whole.untyped_storage())
        if self._is_freed:  # Marked before autograd saves the rows, because swapping asks then.
            saved_tensors.mark_freed(whole)
        return whole

    def start_sum(self, gradient: Tensor) -> None:
        """Start the reduce-scatter of the gradient ``[members * rows, ...]``; it sums in fp32 or wider."""
        self._whole = self.local = None
        sums, group = self.sums, self.sums.group
        # Summed in fp32 or wider, so that the sum over ranks is rounded only once.
        gradient = gradient.to(wide(gradient.dtype))
        if gradient.device.type == "cpu" and sums.runs:
            # Reduce-scatter by pairwise exchange: receive the other ranks' parts, and add them in summed().
            gradient = gradient.contiguous()
            parts = sums.parts_of(gradient)
            ours = torch.cat(parts[group.rank()])
            others = [buffer_pool.take(ours) for _ in range(group.size() - 1)]
            theirs = [other.chunk(len(sums.runs)) for other in others]
            theirs.insert(group.rank(), ())
            self._sum = ours, exchange_pairs(parts, theirs, group), others, gradient
            return
        by_member = gradient.index_select(0, sums.rows_on(gradient.device))
        ours = by_member.new_empty((sums.rows.size(1), *by_member.shape[1:]))
        work = reduce_scatter_tensor(ours, by_member, group=group, async_op=True)
        self._sum = ours, [work], [], by_member

    def summed(self) -> Tensor:
        """Wait for the reduce-scatter; return this rank's part of the sum, in fp32 or wider."""
        assert self._sum is not None
        ours, works, others, _ = self._sum
        for work in works:
            work.wait()
        for other in others:
            ours.add_(other)
        buffer_pool.give_back(*others)
        self._sum = None
        return ours

    def free(self) -> None:
        """Free the memory of the gathered rows until :meth:`start_again`."""
        storage = self._storage()
        if storage is not None:
            storage.resize_(0)

    def start_again(self) -> None:
        """Start the all-gather again, into the same storage, unless it has memory or is gone."""
        storage, local = self._storage(), self.local
        if storage is None or local is None or storage.size():
            return
        # The same storage again, so tensors that backward has saved see the rows.
        shape = (self.members.rows.numel(), *local.shape[1:])
        storage.resize_(math.prod(shape) * local.element_size())
        self._whole = local.new_empty(0).set_(storage).view(shape)
        with named("keys of the sequence"):
            self._launch()


class _Start(torch.autograd.Function):
    """Autograd node that starts a gather. Returns a view of its input, whose shape the gradient must have."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer, ctx.dtype = transfer, local.dtype
        with named("keys of the sequence"):
            transfer.start(local)
        return local.view_as(local)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, nothing: Tensor) -> tuple[Tensor, None]:
        return ctx.transfer.summed().to(ctx.dtype), None


class _Wait(torch.autograd.Function):
    """Autograd node that waits for a gather. For 16-bit dtypes, also returns an fp32 gradient receiver."""

    @staticmethod
    def forward(ctx: Any, started: Tensor, transfer: _Transfer) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        whole = transfer.hand_out()
        ctx.transfer, ctx.nothing = transfer, started.new_zeros(()).expand(started.shape)
        ctx.whole_shape = whole.shape
        # A gradient has its tensor's dtype, so bf16 rows need an fp32 tensor to receive fp32 gradients.
        if wide(whole.dtype) == whole.dtype:
            return whole, None
        return whole, whole.new_zeros((), dtype=wide(whole.dtype)).expand(whole.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None]:
        arrived = [gradient for gradient in gradients if gradient is not None]
        # Always reduce: other ranks wait for this rank's part even if nothing here read the rows.
        total = arrived[-1] if arrived else ctx.nothing.new_zeros(()).expand(ctx.whole_shape)
        for gradient in arrived[:-1]:
            total = total + gradient
        with named("gradient of keys of the sequence"):
            ctx.transfer.start_sum(total)
        return ctx.nothing, None


class _Again(torch.autograd.Function):
    """Identity on an output that was computed from gathered rows. Its backward gathers them again first."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, transfers: list[_Transfer]) -> Tensor:
        ctx.transfers = transfers
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        for transfer in ctx.transfers:
            transfer.start_again()
        for transfer in ctx.transfers:
            transfer.wait()
        return gradient, None


class GatheredRows:
    """All-gather in flight, started by the constructor.

    Args:
        local: this rank's tokens, ``[rows, ...]``.
        members: ranks to gather from, with the positions of their tokens.
        sums: ranks over which the gradient is reduce-scattered; default: ``members``.
        is_freed: whether :func:`freed_until_backward` will free the rows.

    Attributes:
        started: view of ``local`` that connects the two autograd nodes; only for :meth:`wait`.
    """

    def __init__(
        self, local: Tensor, members: Members, sums: Members | None = None, is_freed: bool = False
    ) -> None:
        self._transfer = _Transfer(members, members if sums is None else sums, is_freed)
        self.started: Tensor = _Start.apply(local, self._transfer)

    def wait(self, started: Tensor | None = None) -> Tensor:
        """Wait for the all-gather; return ``[members * rows, ...]`` in sequence order. Call only once.

        Args:
            started: :attr:`started` after other autograd nodes; default: the attribute itself.
        """
        return self.wait_with_receiver(started)[0]

    def wait_with_receiver(self, started: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Like :meth:`wait`, but also return a gradient receiver: an fp32 tensor of the same shape.

        The gradient of 16-bit rows must be 16-bit in autograd, which would round it before the sum over
        ranks. A consumer can take the receiver as an extra input and return the fp32 gradient for it. The
        receiver's values are never read. It is ``None`` if the rows are fp32 or wider.
        """
        started = self.started if started is None else started
        del self.started
        return _Wait.apply(started, self._transfer)  # type: ignore[no-any-return]

    def start_again(self) -> None:
        """Start gathering again the rows that :func:`freed_until_backward` has freed."""
        self._transfer.start_again()


def freed_until_backward(out: Tensor, gathered: list[GatheredRows]) -> Tensor:
    """Free gathered rows after forward; gather them again when the gradient of ``out`` arrives.

    Args:
        out: output of all computations that read the rows.
        gathered: all-gathers of the rows, after their :meth:`GatheredRows.wait`.

    Returns:
        Tensor to use in place of ``out``; its backward gathers the rows.
    """
    transfers = [one._transfer for one in gathered]
    for transfer in transfers:
        transfer.free()
    return _Again.apply(out, transfers)  # type: ignore[no-any-return]


class KeyGather(ContextParallelStrategy):
    """Strategy ``kvallgather_cp_algo``: all-gather keys and values. Supports any layout."""

    def members(self, length: int, group: ProcessGroup | None = None) -> Members:
        """Return the members of a group with the positions of their tokens.

        Args:
            length: number of tokens of the whole sequence.
            group: context parallel group (the default), or its joint group with the tensor parallel ranks,
                which split the tokens under sequence parallelism.
        """
        return Members.of(self.group if group is None else group, self.layout, length)

    def exchange(self, query: Tensor, key: Tensor, value: Tensor) -> Exchanged:
        """All-gather key and value; they can have any number of dimensions."""
        members = self.members(key.size(0) * self.ranks)
        keys, values = GatheredRows(key, members), GatheredRows(value, members)
        return Exchanged(
            query, keys.wait(), values.wait(), self.positions(query.size(0), device=query.device)
        )
