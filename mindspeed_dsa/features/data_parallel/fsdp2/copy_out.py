"""Copy gathered weights out of FSDP2's all-gather buffer in one pass.

FSDP2 copies the gathered pieces out of the buffer, and then copies weights that are not sharded on dimension
0 a second time, to reorder them. The patched function is imported by torch while FSDP2 is still being
imported, so this module must not import modules that import that function.
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
    """Copy the gathered shards of all ranks into the full weights.

    Args:
        gathered: ``[ranks, n]``, each rank's pieces one after the other.
        parameters: ``FSDPParam`` objects in the same order, with allocated memory.
        sizes: number of elements of one piece of each parameter.
    """
    wholes = [param.all_gather_outputs[0] for param in parameters]
    first, targets, pieces = 0, [], []
    # Autograd saved these tensors, and recompute refills them with the same values: keep their versions.
    counted = tuple(whole for whole in wholes if not whole.is_inference())
    with torch.no_grad(), _unsafe_preserve_version_counter(counted):
        for param, flat, size in zip(parameters, wholes, sizes, strict=True):
            whole, end = flat.view(param._orig_size), first + size
            targets.append(_by_rank(whole, param.fsdp_placement.dim, gathered.size(0)))
            pieces.append(gathered[:, first:end].view(targets[-1].shape))
            first = end
        torch._foreach_copy_(targets, pieces)


def _by_rank(whole: Tensor, dim: int, ranks: int) -> Tensor:
    """Return a view ``[ranks, *piece]`` of a tensor that is sharded on ``dim``."""
    # [6, 4] on dim 1 over 2 ranks: unflatten to [6, 2, 2], move to [2, 6, 2].
    pieces: Tensor = whole.unflatten(dim, (ranks, -1)).movedim(dim, 0)
    return pieces


def in_one_pass(original: _Function) -> _Function:
    """Decorate ``foreach_all_gather_copy_out`` to fill the weights directly."""

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
        for param, size in zip(fsdp_params, sizes, strict=True):
            param.init_all_gather_outputs([size], [output.dtype], group.size(), output.device)
            param.alloc_all_gather_outputs()
        _place(output.view(group.size(), -1), fsdp_params, sizes)

    return foreach_all_gather_copy_out


def _gains(output: Tensor, parameters: Sequence[Any], sizes: Sequence[int], ranks: int) -> bool:
    """Return whether one pass saves a copy (some weight is not sharded on dimension 0) and is supported."""
    return (
        output.dtype is not torch.uint8
        and len(sizes) == len(parameters)
        and all(
            param.sharded_state == ShardedState.SHARDED
            and not hasattr(param._sharded_local_tensor, "fsdp_post_all_gather")
            and size * ranks == param._orig_size.numel()  # nothing is padded
            for param, size in zip(parameters, sizes, strict=True)
        )
        and any(param.fsdp_placement.dim != 0 for param in parameters)
    )
