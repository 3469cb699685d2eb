"""Transfers of FSDP2 between processors, as messages.

Pieces of weights and gradients travel from where they lie to where they belong. Over gloo
an all-gather goes through two buffers beside the weights, each as large as all of them, and starts behind
what is sent the other way; without streams, backward waits for every reduction. Here ranks send messages to
each other, receives first, and a unit's sums are waited for once those of the next unit are on their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from mindspeed_dsa.features.data_parallel.fsdp2 import checks
from mindspeed_dsa.features.data_parallel.fsdp2.copy_out import by_rank, place, written_unseen
from mindspeed_dsa.parallel import buffer_pool
from mindspeed_dsa.parallel.local_shards import local_of
from mindspeed_dsa.parallel.names import named
from mindspeed_dsa.parallel.transfers import exchange_pairs

_SMALL = 2**16
"""Bytes of a piece: smaller ones share a message, which costs more than copies of them."""


class Gather:
    """Weights of a unit on their way here.

    Args:
        parameters: ``FSDPParam`` of one dtype, cut evenly.
        group: process group.
    """

    def __init__(self, parameters: Sequence[Any], group: Any) -> None:
        ranks, rank = group.size(), group.rank()
        messages = _Messages(group)
        local: list[tuple[Tensor, Tensor]] = []
        packed: list[Tensor] = []
        self._packed: list[Any] = []
        for each in parameters:
            (shard,) = each.all_gather_inputs
            each.init_all_gather_outputs([shard.numel()], [shard.dtype], ranks, each.device)
            each.alloc_all_gather_outputs()
            if each.fsdp_placement.dim or shard.nbytes < _SMALL:
                self._packed.append(each)
                packed.append(shard)
            else:
                rows = buffer_pool.on_huge_pages(each.all_gather_outputs[0]).view(ranks, -1)
                messages.add([shard] * ranks, rows)
                local.append((rows[rank], shard))
        self._sizes = [shard.numel() for shard in packed]
        if packed:
            self._gathered = packed[0].new_empty(ranks, sum(self._sizes))
            torch.cat(packed, out=self._gathered[rank])
            messages.add([self._gathered[rank]] * ranks, self._gathered)
        with named("weights of a unit"):
            self._works = messages.start()
        with written_unseen([each.all_gather_outputs[0] for each in parameters]):
            for target, shard in local:
                target.copy_(shard)

    def wait(self) -> None:
        """Return when all weights are in their memory."""
        for work in self._works:
            work.wait()
        if self._packed:
            place(self._gathered, self._packed, self._sizes)


def gather(parameters: Sequence[Any], group: Any) -> Gather:
    """Start to gather; every rank of the group calls it in the same order."""
    return Gather(parameters, group)


class _Messages:
    """Messages between all pairs of ranks, sent at a time."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._sends: list[list[Tensor]] = [[] for _ in range(group.size())]
        self._receives: list[list[Tensor]] = [[] for _ in range(group.size())]

    def add(self, sent: Sequence[Tensor] | Tensor, received: Sequence[Tensor] | Tensor) -> None:
        """Add one message to and from each rank, whose entries are contiguous."""
        for peer in range(self._group.size()):
            self._sends[peer].append(sent[peer])
            self._receives[peer].append(received[peer])

    def start(self) -> list[Any]:
        return exchange_pairs(self._sends, self._receives, self._group)


class Reduction:
    """Gradients of a unit on their way to their owners.

    Args:
        unit: whose gradients they are.
        gradients: with each the ``FSDPParam`` that it belongs to.
    """

    def __init__(self, unit: DirectGroup, gradients: Sequence[tuple[Any, Tensor]]) -> None:
        group = unit._reduce_scatter_process_group
        self._rank, self._ranks = group.rank(), group.size()
        self.unit: Any = unit
        dtype = unit._reduce_dtype or gradients[0][1].dtype
        self._messages = _Messages(group)
        # Whose pieces they are, all pieces of this rank, and this piece of all ranks, both [ranks, n].
        self._lots: list[tuple[list[Any], Tensor, Tensor]] = []
        packed: list[tuple[Any, Tensor]] = []
        for each, gradient in gradients:
            pieces = by_rank(gradient, each.fsdp_placement.dim, self._ranks)
            if pieces.is_contiguous() and pieces.dtype == dtype and pieces[0].nbytes >= _SMALL:
                self._send([each], pieces.flatten(1))
            else:
                packed.append((each, pieces))
        if packed:
            sizes = [pieces[0].numel() for _, pieces in packed]
            buffer = packed[0][1].new_empty(self._ranks, sum(sizes), dtype=dtype)
            places = [
                part.view(pieces.shape)
                for part, (_, pieces) in zip(buffer.split(sizes, 1), packed, strict=True)
            ]
            torch._foreach_copy_(places, [pieces for _, pieces in packed])
            self._send([each for each, _ in packed], buffer)
        with named("gradients of a unit"):
            self._works = self._messages.start()

    def _send(self, owners: list[Any], pieces: Tensor) -> None:
        received = buffer_pool.take(pieces)
        self._messages.add(pieces, received)
        self._lots.append((owners, pieces, received))

    def drop(self) -> None:
        """Wait for the messages, and add nothing."""
        for work in self._works:
            work.wait()
        buffer_pool.give_back(*(received for _, _, received in self._lots))

    @torch.no_grad()
    def finish(self) -> None:
        """Return when this rank's pieces of the sums are added to its gradients."""
        for work in self._works:
            work.wait()
        sizes = [pieces.size(1) for _, pieces, _ in self._lots]
        total = self._lots[0][1].new_empty(sum(sizes))
        for (_, pieces, received), part in zip(self._lots, total.split(sizes), strict=True):
            others = [received[rank] for rank in range(self._ranks) if rank != self._rank]
            torch.add(pieces[self._rank], others.pop(0), out=part)
            for other in others:
                part.add_(other)
            buffer_pool.give_back(received)
        if isinstance(self.unit.mesh_info, DDPMeshInfo):  # replicas have sums of their own
            dist.all_reduce(total, group=self.unit._all_reduce_process_group)
        total.div_(self.unit.gradient_divide_factor or self.unit.mesh_info.mesh.size())
        owners = [each for lot in self._lots for each in lot[0]]
        parts = total.split([each.sharded_size.numel() for each in owners])
        for each, part in zip(owners, parts, strict=True):
            _accumulate(each, part.view(each.sharded_size))


def _accumulate(each: Any, part: Tensor) -> None:
    parameter = each.sharded_param
    if parameter.grad is None:
        parameter.grad = each.to_sharded_dtensor(part)
    else:
        local_of(parameter.grad).add_(part)
    for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(parameter)


class Reductions:
    """Reductions of a model that are under way: a unit's, beside those of the one that is just starting."""

    def __init__(self) -> None:
        self._under_way: list[Reduction] = []

    def __len__(self) -> int:
        """Return those that nobody has waited for."""
        return len(self._under_way)

    def start(self, unit: DirectGroup, gradients: Sequence[tuple[Any, Tensor]]) -> None:
        """Start one; every rank of the group calls it in the same order."""
        before, self._under_way = self._under_way, []
        started = Reduction(unit, gradients)
        for each in before:
            # Where a unit's weights lie on several sets of ranks, each set has a reduction.
            if each.unit is not unit and each.unit.modules is unit.modules:
                self._under_way.append(each)
            else:
                each.finish()
        self._under_way.append(started)

    def finish(self) -> None:
        """Return when all gradients are there."""
        while self._under_way:
            self._under_way.pop(0).finish()

    def drop(self) -> None:
        """Forget those of a step that failed."""
        while self._under_way:
            self._under_way.pop(0).drop()


class DirectGroup(FSDPParamGroup):
    """A unit's parameters; what FSDP2 asks for and is not served here goes its own way.

    Attributes:
        reductions: of the model.
    """

    reductions: Reductions
    _all_gather_result: Any

    @classmethod
    def takes(cls, group: Any) -> bool:
        """Return whether an ``FSDPParamGroup`` has plain tensors of one type on the host."""
        tensors = [each._sharded_local_tensor for each in group.fsdp_params]
        return (
            group.device.type == "cpu"
            and len({tensor.dtype for tensor in tensors}) == 1
            and not any(hasattr(tensor, "fsdp_pre_all_gather") for tensor in tensors)
        )

    @classmethod
    def convert(cls, group: Any, reductions: Reductions) -> None:
        """Make an ``FSDPParamGroup`` one of these, with whatever refers to it.

        Raises:
            SettingsError: its methods are not those that are overridden here.
        """
        checks.require_overrides(cls)
        checks.require_names(group, ("_training_state", "_all_gather_result", "modules"))
        for each in group.fsdp_params:
            checks.require_names(each, ("_unsharded_param", "unsharded_accumulated_grad"))
        group.__class__ = cls
        group.reductions = reductions

    @torch.no_grad()
    def unshard(self, async_op: bool = False) -> None:
        """Start to gather, unless it is done or not needed."""
        unneeded = not self.unshard_in_backward and self._training_state == TrainingState.PRE_BACKWARD
        if self.is_sharded_post_forward:  # kept on fewer ranks
            super().unshard(async_op)
        elif self.is_sharded and self._all_gather_result is None and not unneeded:
            self._all_gather_result = gather(self.fsdp_params, self._all_gather_process_group)

    def wait_for_unshard(self) -> None:
        """Return when the module has its whole weights, if a gather is under way."""
        if not isinstance(self._all_gather_result, Gather):
            super().wait_for_unshard()
            return
        self._all_gather_result.wait()
        self._all_gather_result = None
        for each in self.fsdp_params:
            each.init_unsharded_param()
        self._to_unsharded()

    def post_backward(self, *unused: Any) -> None:
        """Start to reduce the gradients that are there, and drop the weights."""
        stock = not self.reduce_grads or not self.all_reduce_grads or self._all_reduce_hook is not None
        stock |= self._partial_reduce_output is not None  # sums that replicas still have to add up
        if stock or getattr(self, "reduce_scatter_unused_params", False):
            super().post_backward(*unused)
            return
        self._training_state = TrainingState.POST_BACKWARD
        gradients = [(each, _take_gradient(each)) for each in self.fsdp_params]
        if self.reshard_after_backward:
            self.reshard()
        complete = [(each, gradient) for each, gradient in gradients if gradient is not None]
        if complete:
            self.reductions.start(self, complete)

    def finalize_backward(self) -> None:
        """Wait for gradients, and for a gather that turned out to be for nobody."""
        self.reductions.finish()
        if isinstance(self._all_gather_result, Gather):
            self.wait_for_unshard()
            self._to_sharded()
        super().finalize_backward()

    def _reset_iter_state(self) -> None:
        self.reductions.drop()
        if isinstance(self._all_gather_result, Gather):
            self.wait_for_unshard()
        for each in self.fsdp_params:
            _take_gradient(each)  # FSDP2 would add it to the next step's
        super()._reset_iter_state()

    def _wait_for_post_backward(self) -> None:
        self.reductions.finish()
        super()._wait_for_post_backward()


@torch.no_grad()
def _take_gradient(each: Any) -> Tensor | None:
    """Take the whole gradient of an ``FSDPParam``, with what earlier backward passes have left unreduced."""
    if not hasattr(each, "_unsharded_param"):
        return None
    each.accumulate_unsharded_grad_if_needed()
    gradient: Tensor | None = each.unsharded_accumulated_grad
    if gradient is not None:
        each.unsharded_accumulated_grad = None
    else:
        gradient, each._unsharded_param.grad = each._unsharded_param.grad, None
    return gradient
