"""Weights out of the buffer that FSDP2 gathers into, each in one pass.

FSDP2 splits the buffer, and copies once more what was not cut on its first dimension, which reads and writes
all of the weight again. The patched function is asked for while torch is still importing FSDP2, so this file
imports none of the modules that import that function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from mindspeed_dsa.patches import versions

_unsafe_preserve_version_counter = versions.private(
    "torch.autograd.grad_mode:_unsafe_preserve_version_counter", "FSDP2"
)
_Function = Callable[..., Any]


def _place(gathered: Tensor, parameters: Sequence[Any], sizes: Sequence[int]) -> None:
    """Fill the memory of gathered weights.

    Args:
        gathered: ``[ranks, n]``: of each rank all pieces, one after the other.
        parameters: ``FSDPParam``, in that order, whose memory is there.
        sizes: of a piece of each, in elements.
    """
    wholes = [each.all_gather_outputs[0] for each in parameters]
    first, targets, pieces = 0, [], []
    # Autograd has saved these tensors; recomputation fills them with the values that they had.
    counted = tuple(whole for whole in wholes if not whole.is_inference())
    with torch.no_grad(), _unsafe_preserve_version_counter(counted):
        for each, flat, size in zip(parameters, wholes, sizes, strict=True):
            whole, end = flat.view(each._orig_size), first + size
            targets.append(_by_rank(whole, each.fsdp_placement.dim, gathered.size(0)))
            pieces.append(gathered[:, first:end].view(targets[-1].shape))
            first = end
        torch._foreach_copy_(targets, pieces)


def _by_rank(whole: Tensor, dim: int, ranks: int) -> Tensor:
    """View a tensor that is cut on ``dim`` as ``[ranks, *piece]``, by the rank that has each piece."""
    pieces: Tensor = whole.unflatten(dim, (ranks, -1)).movedim(dim, 0)
    return pieces


def in_one_pass(original: _Function) -> _Function:
    """Decorate ``foreach_all_gather_copy_out``, which splits only, and leaves the rest to further copies."""

    def foreach_all_gather_copy_out(all_gather_result: Any, fsdp_params: list[Any], group: Any) -> None:
        output = all_gather_result.all_gather_output
        event, work = all_gather_result.all_gather_event, all_gather_result.all_gather_work
        sizes = all_gather_result.all_gather_input_split_sizes
        if not _gains(output, fsdp_params, sizes, group.size()):
            original(all_gather_result, fsdp_params, group)
            return
        if event is not None:
            torch.get_device_module(output.device).current_stream().wait_event(event)
        if work is not None:
            work.wait()
        for each, size in zip(fsdp_params, sizes, strict=True):
            each.init_all_gather_outputs([size], [output.dtype], group.size(), output.device)
            each.alloc_all_gather_outputs()
        _place(output.view(group.size(), -1), fsdp_params, sizes)

    return foreach_all_gather_copy_out


def _gains(output: Tensor, parameters: Sequence[Any], sizes: Sequence[int], ranks: int) -> bool:
    """Return whether more than a split is to do, and the buffer holds one piece of each, as it is."""
    return (
        output.dtype is not torch.uint8
        and len(sizes) == len(parameters)
        and all(
            each.sharded_state == ShardedState.SHARDED
            and not hasattr(each._sharded_local_tensor, "fsdp_post_all_gather")
            and size * ranks == each._orig_size.numel()  # nothing is padded
            for each, size in zip(parameters, sizes, strict=True)
        )
        and any(each.fsdp_placement.dim != 0 for each in parameters)
    )
