"""What the workers run in ``test_uneven_splits.py``."""

from __future__ import annotations

import torch
import torch.distributed as dist


def gather(sizes: list[int], weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather rows of all ranks, ``sizes[rank]`` of each; ``(gathered, gradient of this rank's rows)``.

    The loss of each rank is its rank plus one times the ``weights``, ``[sum(sizes), 3]``.
    """
    mappings = _mappings()
    rank = dist.get_rank()
    rows = torch.full((sizes[rank], 3), float(rank), requires_grad=True)
    whole = mappings.gather_from_sequence_parallel_region(
        rows, group=dist.group.WORLD, output_split_sizes=sizes
    )
    ((rank + 1) * whole * weights).sum().backward()
    assert rows.grad is not None
    return whole.detach(), rows.grad


def reduce_scatter(sizes: list[int], weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add up ``(rank + 1) * weights`` over ranks and keep this rank's rows; ``(rows, gradient)``.

    The gradient is that of what went in; the loss of each rank is its rank plus one times the sum of its
    rows.
    """
    mappings = _mappings()
    rank = dist.get_rank()
    whole = ((rank + 1) * weights).requires_grad_()
    rows = mappings.reduce_scatter_to_sequence_parallel_region(
        whole, group=dist.group.WORLD, input_split_sizes=sizes
    )
    ((rank + 1) * rows).sum().backward()
    assert whole.grad is not None
    return rows.detach(), whole.grad


def expert_splits() -> list[str]:
    """Types of what the token dispatcher gets for its split sizes."""
    import mindspeed_dsa

    mindspeed_dsa.enable(mindspeed_platform="cpu")
    from megatron.core.transformer.moe import token_dispatcher

    move = token_dispatcher.maybe_move_tensor_to_cpu
    sizes = torch.tensor([3, 5])
    return [type(move(sizes, as_numpy=True)).__name__, type(move(sizes)).__name__, type(move(None)).__name__]


def _mappings():
    import mindspeed_dsa

    mindspeed_dsa.enable(mindspeed_platform="cpu")
    from megatron.core.tensor_parallel import mappings

    return mappings
