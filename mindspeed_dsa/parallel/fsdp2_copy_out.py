"""Weights out of the buffer that FSDP2 gathers into, each in one pass, laid out as their reader wants them.

FSDP2 splits the buffer, and copies once more what was not cut on its first dimension; a reader with a layout
of its own, such as the blocks of an NPU's matrix unit, would copy again. Every further copy reads and writes
all of the weight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

_Function = Callable[..., Any]
_LAYOUT = "_mindspeed_dsa_layout"


@dataclass(frozen=True)
class Layout:
    """How the reader of a weight wants it in memory.

    Attributes:
        write: gets the gathered buffer ``[ranks, n]``, the first and the end column of this weight in it, and
            the weight, contiguous and in its own shape, whose memory it fills. Row ``r`` of these columns is
            rank ``r``'s piece.
        takes: gets the shapes of the weight and of a piece; others are split as ever, and their reader asks
            the same question.
    """

    write: Callable[[Tensor, int, int, Tensor], None]
    takes: Callable[[torch.Size, torch.Size], bool]


def lay_out(parameter: nn.Parameter, layout: Layout) -> None:
    """Gather a weight into a layout that whoever reads it knows; before the weight is sharded.

    PyTorch takes the memory for the plain tensor that it was: nothing else may read it. Units have to be made
    by :func:`fsdp2_shards.shard`, and gather by messages or with :func:`in_one_pass` in place: others ignore
    layouts.
    """
    setattr(parameter, _LAYOUT, layout)


def layout_of(each: Any) -> Layout | None:
    """That of an ``FSDPParam``; None where the plain one is meant.

    Raises:
        ValueError: a weight with a layout is not cut on its first dimension.
    """
    layout: Layout | None = getattr(each.sharded_param, _LAYOUT, None)
    if layout is None or not layout.takes(each._orig_size, each.padded_sharded_param_size):
        return None
    if each.fsdp_placement.dim != 0:
        raise ValueError(
            f"fsdp2: a weight of shape {tuple(each._orig_size)} is cut on dimension "
            f"{each.fsdp_placement.dim}, and layouts are written from pieces of rows; cut it on dimension 0"
        )
    return layout


@contextlib.contextmanager
def written_unseen(wholes: Sequence[Tensor]) -> Iterator[None]:
    """Memory is filled again with what autograd has saved of it."""
    counted = tuple(each for each in wholes if not each.is_inference())
    with torch.no_grad(), _unsafe_preserve_version_counter(counted):
        yield


def place(gathered: Tensor, parameters: Sequence[Any], sizes: Sequence[int]) -> None:
    """Fill the memory of gathered weights.

    Args:
        gathered: ``[ranks, n]``: of each rank all pieces, one after the other.
        parameters: ``FSDPParam``, in that order, whose memory is there.
        sizes: of a piece of each, in elements.
    """
    wholes = [each.all_gather_outputs[0] for each in parameters]
    first, plain, pieces = 0, [], []
    with written_unseen(wholes):
        for each, flat, size in zip(parameters, wholes, sizes, strict=True):
            whole, end = flat.view(each._orig_size), first + size
            if (layout := layout_of(each)) is not None:
                layout.write(gathered, first, end, whole)
            else:
                plain.append(by_rank(whole, each.fsdp_placement.dim, gathered.size(0)))
                pieces.append(gathered[:, first:end].view(plain[-1].shape))
            first = end
        if plain:
            torch._foreach_copy_(plain, pieces)


def by_rank(whole: Tensor, dim: int, ranks: int) -> Tensor:
    """``[ranks, *piece]``: what each rank has of a tensor that is cut on ``dim``; a view."""
    pieces: Tensor = whole.unflatten(dim, (ranks, -1)).movedim(dim, 0)
    return pieces


def in_one_pass(original: _Function) -> _Function:
    """Decorate ``foreach_all_gather_copy_out``, which splits only, and leaves the rest to further copies."""

    def foreach_all_gather_copy_out(all_gather_result: Any, fsdp_params: list[Any], group: Any) -> None:
        output, event, work, _, _, sizes = all_gather_result
        if not _gains(output, fsdp_params, sizes, group.size()):
            _refuse_layouts(fsdp_params)
            original(all_gather_result, fsdp_params, group)
            return
        if event is not None:
            _get_device_handle(output.device.type).current_stream().wait_event(event)
        if work is not None:
            work.wait()
        for each, size in zip(fsdp_params, sizes, strict=True):
            each.init_all_gather_outputs([size], [output.dtype], group.size(), output.device)
            each.alloc_all_gather_outputs()
        place(output.view(group.size(), -1), fsdp_params, sizes)

    return foreach_all_gather_copy_out


def _gains(output: Tensor, parameters: Sequence[Any], sizes: Sequence[int], ranks: int) -> bool:
    """Whether a split is not all there is to do, and the buffer holds one piece of each, as it is."""
    return (
        output.dtype is not torch.uint8
        and len(sizes) == len(parameters)
        and all(
            each.sharded_state == ShardedState.SHARDED
            and not hasattr(each._sharded_local_tensor, "fsdp_post_all_gather")
            and size * ranks == each._orig_size.numel()  # nothing is padded
            for each, size in zip(parameters, sizes, strict=True)
        )
        and any(each.fsdp_placement.dim != 0 or layout_of(each) is not None for each in parameters)
    )


def _refuse_layouts(parameters: Sequence[Any]) -> None:
    """Their readers would take plain weights for laid out ones."""
    for each in parameters:
        # What is kept on fewer ranks after forward is laid out already, and goes through as it is.
        if each.sharded_state == ShardedState.SHARDED and layout_of(each) is not None:
            raise ValueError(
                f"fsdp2: a weight of shape {tuple(each._orig_size)} has a layout, and a unit with it has "
                "parameters that are padded, of another type, or gathered in a way of their own; make these "
                "a unit of their own"
            )
