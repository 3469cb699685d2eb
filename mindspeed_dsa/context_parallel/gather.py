"""Rows of all ranks, gathered in the order of the sequence behind other work, in forward and in backward.

A gather is two nodes of the graph. The first starts the collective in forward, the second waits for it. In
backward the second comes first and starts the reduce-scatter of the gradient, and the first waits for it:
autograd runs nodes in the reverse order of their creation, so that what forward does between the two hides
the transfer in both directions.
"""

from __future__ import annotations

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
    """Rows of a sequence that each member of a group has; without the group, so that it keeps none alive.

    Args:
        rows: ``[members, rows]`` int64 on the CPU, positions in the order in which each member holds them.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self._parts: dict[tuple[int, int], HeldRows] = {}
        self._on_device: dict[torch.device, Tensor] = {}

    def part(self, index: int, step: int) -> HeldRows:
        """Return the rows of every ``step``-th member, from this one on."""
        if (index, step) not in self._parts:
            self._parts[index, step] = HeldRows(self.rows[index::step])
        return self._parts[index, step]

    def on(self, device: torch.device) -> Tensor:
        """Return :attr:`rows` of all members in a row, on a device, where they stay."""
        if device not in self._on_device:
            self._on_device[device] = self.rows.flatten().to(device)
        return self._on_device[device]

    @cached_property
    def runs(self) -> list[list[int]]:
        """Where equal runs of the members' rows begin in the sequence: ``[run][member]``; empty if a member
        has more than two, or runs of another length.
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
"""Sequences whose rows stay known, each some bytes for a row on the host and on the device. Lengths that are
never met again go; what is in flight holds its own."""


@lru_cache(maxsize=LATEST)
@torch.inference_mode(False)  # what an evaluation finds first, training uses as well
def _held(layout: Layout, length: int, members: int) -> HeldRows:
    """Make the rows that all layers and groups share."""
    return HeldRows(rows_of_all(layout, length).view(members, -1))


@dataclass(frozen=True)
class Members:
    """Ranks of a group, and which rows of the sequence each of them has.

    Attributes:
        group: process group.
        held: by member.
    """

    group: ProcessGroup
    held: HeldRows

    @classmethod
    def of(cls, group: ProcessGroup, layout: Layout, length: int) -> Members:
        """Build of context parallel ranks, or of these times tensor parallel ones that share their rows.

        Args:
            group: with more members than the layout has ranks, tensor parallel ones run fastest.
            layout: of context parallel ranks.
            length: rows of the whole sequence.
        """
        return cls(group, _held(layout, length, group.size()))

    @property
    def rows(self) -> Tensor:
        """Return the rows of all members, as :class:`HeldRows` has them."""
        return self.held.rows

    def part(self, group: ProcessGroup, index: int) -> Members:
        """Return the members of a smaller group of this rank's: one of each neighbours, all at one place.

        Args:
            group: context parallel ranks, of members that are these times tensor parallel ones.
            index: tensor parallel rank.
        """
        return Members(group, self.held.part(index, self.group.size() // group.size()))

    def rows_on(self, device: torch.device) -> Tensor:
        """Return the rows on a device, as :meth:`HeldRows.on` does."""
        return self.held.on(device)

    @property
    def runs(self) -> list[list[int]]:
        """Return the runs of rows, as :attr:`HeldRows.runs` has them."""
        return self.held.runs

    def parts_of(self, whole: Tensor) -> list[list[Tensor]]:
        """Return each member's runs of the sequence's rows, as views; the members must have runs."""
        size = self.rows.size(1) // len(self.runs)
        return [[whole[begin : begin + size] for begin in begins] for begins in zip(*self.runs, strict=True)]


class _Transfer:
    """One gather: what is on its way, and where to."""

    def __init__(self, members: Members, sums: Members) -> None:
        self.members, self.sums = members, sums
        self.local: Tensor | None = None
        self._whole: Tensor | None = None
        self._by_member: Tensor | None = None
        self._works: list[Any] = []
        self._sum: tuple[Tensor, list[Any], list[Tensor], Tensor] | None = None
        self._is_here = False

    def start(self, local: Tensor) -> None:
        """Start to gather ``[rows, ...]``."""
        self.local = local.detach().contiguous()
        self._whole = local.new_empty((self.members.rows.numel(), *local.shape[1:]))
        self._launch()

    def _launch(self) -> None:
        local, whole, group = self.local, self._whole, self.members.group
        assert local is not None
        assert whole is not None
        self._is_here = False
        if not self.members.runs:
            self._by_member = buffer_pool.take(whole)
            self._works = [dist.all_gather_into_tensor(self._by_member, local, group=group, async_op=True)]
            return
        parts, own = self.members.parts_of(whole), local.chunk(len(self.members.runs))
        if whole.device.type == "cpu":
            self._works = exchange_pairs([own] * len(parts), parts, group)
            for view, part in zip(parts[group.rank()], own, strict=True):
                view.copy_(part)
            return
        self._works = [
            dist.all_gather(list(views), part, group=group, async_op=True)
            for views, part in zip(zip(*parts, strict=True), own, strict=True)
        ]

    def wait(self) -> Tensor:
        """Wait, and return ``[members * rows, ...]`` in the order of the sequence."""
        assert self._whole is not None
        if not self._is_here:
            for work in self._works:
                work.wait()
            if self._by_member is not None:
                self._whole.index_copy_(0, self.members.rows_on(self._whole.device), self._by_member)
                buffer_pool.give_back(self._by_member)
            self._works, self._by_member, self._is_here = [], None, True
        return self._whole

    def hand_out(self) -> Tensor:
        """Hand out the rows; another tensor on their memory stays here, without a graph and a version."""
        whole = self.wait()
        self._whole = whole.data
        return whole

    def start_sum(self, gradient: Tensor) -> None:
        """Start to add up the gradient over ranks, ``[members * rows, ...]`` of any floating point type."""
        self._whole = self.local = None
        sums, group = self.sums, self.sums.group
        # Sums of several ranks' parts are rounded once.
        gradient = gradient.to(wide(gradient.dtype))
        if gradient.device.type == "cpu" and sums.runs:
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
        """Return this rank's rows of the sum, in fp32 or wider."""
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
        """Give back the memory of what was gathered until :meth:`start_again`."""
        assert self._whole is not None
        storage = self._whole.untyped_storage()
        saved_tensors.mark_freed(self._whole)
        storage.resize_(0)

    def start_again(self) -> None:
        """Gather to the same memory again; nothing happens where that is done or under way."""
        if self._whole is None or self._whole.untyped_storage().size():
            return
        self._whole.untyped_storage().resize_(self._whole.numel() * self._whole.element_size())
        self._launch()


class _Start(torch.autograd.Function):
    """Its output is a view of the input: autograd checks that gradients fit, and a buffer would not."""

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
    """Rows, and, if they are narrow, a receiver of their gradient in fp32: a tensor's own is as narrow."""

    @staticmethod
    def forward(ctx: Any, started: Tensor, transfer: _Transfer) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        whole = transfer.hand_out()
        ctx.transfer, ctx.nothing = transfer, started.new_zeros(()).expand(started.shape)
        ctx.whole_shape = whole.shape
        if wide(whole.dtype) == whole.dtype:
            return whole, None
        return whole, whole.new_zeros((), dtype=wide(whole.dtype)).expand(whole.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None]:
        arrived = [gradient for gradient in gradients if gradient is not None]
        # Other ranks wait for this one's part of the sum, whether or not anything read the rows here.
        total = arrived[-1] if arrived else ctx.nothing.new_zeros(()).expand(ctx.whole_shape)
        for gradient in arrived[:-1]:
            total = total + gradient
        with named("gradient of keys of the sequence"):
            ctx.transfer.start_sum(total)
        return ctx.nothing, None


class _Again(torch.autograd.Function):
    """Identity on the output of what read the gathered rows; in backward these are gathered again."""

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
    """Rows of all members on their way here.

    Args:
        local: ``[rows, ...]``, this rank's.
        members: who has which rows.
        sums: over whom gradients are added up, each of whom gets its own rows of the sum; default: the
            members.

    Attributes:
        started: ``local``, of which nothing but :meth:`wait` may depend.
    """

    def __init__(self, local: Tensor, members: Members, sums: Members | None = None) -> None:
        self._transfer = _Transfer(members, members if sums is None else sums)
        self.started: Tensor = _Start.apply(local, self._transfer)

    def wait(self, started: Tensor | None = None) -> Tensor:
        """Wait, once, and return ``[members * rows, ...]`` in the order of the sequence.

        Args:
            started: :attr:`started`, where it came by another way.
        """
        return self.wait_with_receiver(started)[0]

    def wait_with_receiver(self, started: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Do as :meth:`wait`, with a tensor of the same shape that is never read.

        Whoever computes the gradient of narrow rows in fp32 gives it to the second tensor instead of the
        first: it is then not rounded before it is added up. None: the rows are fp32 or wider.
        """
        started = self.started if started is None else started
        del self.started
        return _Wait.apply(started, self._transfer)  # type: ignore[no-any-return]

    def start_again(self) -> None:
        """Start to gather what :func:`freed_until_backward` has freed."""
        self._transfer.start_again()


def freed_until_backward(out: Tensor, gathered: list[GatheredRows]) -> Tensor:
    """Free gathered rows that backward reads, and gather them again when the gradient of ``out`` arrives.

    Args:
        out: output of everything that reads them.
        gathered: on which :meth:`GatheredRows.wait` has been called.

    Returns:
        ``out``, to be used in its place.
    """
    transfers = [one._transfer for one in gathered]
    for transfer in transfers:
        transfer.free()
    return _Again.apply(out, transfers)  # type: ignore[no-any-return]


class KeyGather(ContextParallelStrategy):
    """Strategy that gathers keys and values, in any layout of rows; ``kvallgather_cp_algo``."""

    def members(self, length: int, group: ProcessGroup | None = None) -> Members:
        """Return who has which rows of a sequence.

        Args:
            length: rows of the whole sequence.
            group: default: the context parallel ranks; or these times tensor parallel ranks, which have
                equal parts of their rows under sequence parallelism.
        """
        return Members.of(self.group if group is None else group, self.layout, length)

    def exchange(self, query: Tensor, key: Tensor, value: Tensor) -> Exchanged:
        """Gather key and value, which may have any number of dimensions."""
        members = self.members(key.size(0) * self.ranks)
        keys, values = GatheredRows(key, members), GatheredRows(value, members)
        return Exchanged(
            query, keys.wait(), values.wait(), self.positions(query.size(0), device=query.device)
        )
