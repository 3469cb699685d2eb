"""Kernels for Hopper alone, whose warp groups have parts of their own: choice and launch.

They are written in Gluon, which shows the warp groups and changes from release to release: with a Triton that
nobody tried, and for other sizes, types and GPUs, the plain kernels run. Both compute the same.
"""

from __future__ import annotations

import torch
import triton
from packaging.version import Version
from torch import Tensor

from mindspeed_dsa.ops.sparse_flash_attention.shared_tiles import MOST_ENTRIES
from mindspeed_dsa.ops.triton.common import LOG2E, block, interpreted
from mindspeed_dsa.ops.triton.launch import HOPPER, capability_of, on_grid

# Whether this Triton's Gluon compiles the kernels.
HAS_GLUON = (3, 7) <= Version(triton.__version__).release[:2] <= (3, 9)
_VALUE_DIM, _DIM = 512, 576
# Heads of a program: beside the queries of this many, two tiles of keys fit into shared memory.
_HEADS = 64
# Up to this many heads, keys are in the rows of products, and heads in the columns.
_FEW_HEADS = 16
# Heads that fit for the sum, which reads each key once for all of them.
_SUMMED_HEADS = 128
# A warp group of four that multiplies, one more, and one that copies; 168 registers of each of their threads
# are redistributed among them.
_OPTIONS = {"num_warps": 4, "maxnreg": 168}

if HAS_GLUON:
    from mindspeed_dsa.ops.sparse_flash_attention.hopper_attention_sum import hopper_attention_sum_kernel
    from mindspeed_dsa.ops.sparse_flash_attention.hopper_backward import hopper_backward_keys_kernel
    from mindspeed_dsa.ops.sparse_flash_attention.hopper_backward_rows import hopper_backward_rows_kernel
    from mindspeed_dsa.ops.sparse_flash_attention.hopper_few_heads import hopper_few_heads_forward_kernel
    from mindspeed_dsa.ops.sparse_flash_attention.hopper_forward import hopper_forward_kernel


def takes(query: Tensor, key_value: Tensor, value_dim: int) -> bool:
    """Return whether :func:`forward` computes this; the last dimensions have no gaps."""
    return (
        HAS_GLUON
        and not interpreted()
        and capability_of(query.device) == HOPPER
        and query.dtype in (torch.bfloat16, torch.float16)
        and (value_dim, query.shape[3]) == (_VALUE_DIM, _DIM)
        and _in_lines(query)
        and _in_lines(key_value)
    )


def takes_sum(query: Tensor, key_value: Tensor, value_dim: int) -> bool:
    """Return whether :func:`attention_sum` computes this."""
    return query.shape[2] <= _SUMMED_HEADS and takes(query, key_value, value_dim)


def _in_lines(tensor: Tensor) -> bool:
    """Return whether the compiler can prove for every row that it may copy 16 bytes at once."""
    return tensor.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in tensor.stride()[:-1])


def takes_backward(query: Tensor, key_value: Tensor, grad_out: Tensor, value_dim: int, topk: int) -> bool:
    """Return whether :func:`gradients_of_keys` computes this."""
    return topk <= MOST_ENTRIES and takes(query, key_value, value_dim) and _in_lines(grad_out)


def backward_heads(heads: int) -> int:
    """Heads of a tile of queries and output gradients."""
    return 16 if heads <= 16 else 32


def forward(
    query: Tensor,
    key_value: Tensor,
    indices: Tensor,
    lengths: Tensor,
    softmax_scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Output and log-sum-exp of ``[batch, rows, heads, 576]`` queries, into ``out`` and ``lse``.

    ``indices`` are ``[batch, rows, topk]`` int32, contiguous; ``lengths`` are ``[batch * rows]`` int32, one
    past the last entry of each row that is a key.
    """
    batch, rows, heads, _ = query.shape
    arguments = (
        *(query, key_value, indices, lengths, out, lse, rows, key_value.shape[1], heads, indices.shape[2]),
        *(*query.stride()[:3], *key_value.stride()[:2], softmax_scale * LOG2E),
    )
    if heads <= _FEW_HEADS:
        on_grid(hopper_few_heads_forward_kernel, batch * rows)(*arguments, **_OPTIONS)
    else:
        on_grid(hopper_forward_kernel, batch * rows * triton.cdiv(heads, _HEADS))(*arguments, **_OPTIONS)


def attention_sum(
    query: Tensor,
    key_value: Tensor,
    indices: Tensor,
    lengths: Tensor,
    lse: Tensor,
    softmax_scale: float,
    summed: Tensor,
) -> None:
    """Probabilities summed over heads, into ``summed``, fp32 and of the shape of ``indices``."""
    batch, rows, heads, _ = query.shape
    on_grid(hopper_attention_sum_kernel, batch * rows)(
        *(query, key_value, indices, lengths, lse, summed, rows, key_value.shape[1], heads, indices.shape[2]),
        *(*query.stride()[:3], *key_value.stride()[:2], softmax_scale * LOG2E),
        HEADS=block(heads),
        **_OPTIONS,
    )


def gradients_of_keys(
    inputs: tuple[Tensor, ...],
    results: tuple[Tensor, Tensor | None, Tensor],
    tiles: tuple[Tensor, ...],
    first: int,
    softmax_scale: float,
    atomic: bool,
) -> None:
    """Gradients of keys and of scores of some rows, as ``backward_keys_kernel`` computes them.

    Args:
        inputs: query, keys, gradient of the output, log-sum-exp and delta.
        results: gradients of scores, ``[at least rows, topk, heads]`` in the order of the tiles,
            with heads up to a multiple of :func:`backward_heads`; sum over heads or None,
            ``[batch, rows, topk]`` fp32; and gradients of keys, fp32, ``[batch * key_length, dim]`` or
            ``[at least rows, topk, dim]``.
        tiles: indices and places of the rows, ``[rows, topk]`` each; tasks, and the two bounds of the
            rows' among them.
        first: number of the first row, counted over the batch.
        softmax_scale: of the scores.
        atomic: add to ``[batch * key_length, dim]``; or else write a row for each entry that is a key and is
            not :func:`added_by_others`.
    """
    query, key_value, grad_out, lse, delta = inputs
    grad_scores, summed, grad_keys = results
    on_grid(hopper_backward_keys_kernel, _multiprocessors(query.device))(
        *(query, key_value, *tiles, grad_out, lse, delta),
        *(grad_scores, lse if summed is None else summed, grad_keys),
        *(first, query.shape[1], key_value.shape[1], query.shape[2], tiles[0].shape[1]),
        *(*query.stride()[:3], *key_value.stride()[:2], *grad_out.stride()[:3]),
        *(softmax_scale, softmax_scale * LOG2E),
        HEADS=backward_heads(query.shape[2]),
        WITH_SUM=summed is not None,
        ATOMIC=atomic,
        num_warps=8,
        maxnreg=168,
    )


def takes_rows(query: Tensor, key_value: Tensor, grad_out: Tensor, value_dim: int) -> bool:
    """Return whether :func:`gradients_of_rows` computes this.

    Fewer heads leave most of a program's 64 empty and add as much to the keys' gradients. The sum over heads
    is of two programs at most: they give the same in either order.
    """
    return (
        _HEADS // 2 < query.shape[2] <= _SUMMED_HEADS
        and takes(query, key_value, value_dim)
        and _in_lines(grad_out)
    )


def gradients_of_rows(
    inputs: tuple[Tensor, ...],
    results: tuple[Tensor, Tensor, Tensor | None],
    indices: Tensor,
    lengths: Tensor,
    softmax_scale: float,
) -> None:
    """Form all gradients, those of the keys added with atomics, in no fixed order.

    Args:
        inputs: query, keys, gradient of the output, log-sum-exp and delta.
        results: gradients of queries, ``[batch, rows, heads, 576]``; of keys, ``[batch * key_length, 576]``
            fp32, zeros before; and the sum over heads or None, ``[batch, rows, topk]`` fp32, zeros before.
        indices: as for :func:`forward`.
        lengths: as for :func:`forward`.
        softmax_scale: of the scores.
    """
    query, key_value, grad_out, lse, delta = inputs
    grad_query, grad_keys, summed = results
    batch, rows, heads, _ = query.shape
    on_grid(hopper_backward_rows_kernel, batch * rows * triton.cdiv(heads, _HEADS))(
        *(query, key_value, indices, lengths, grad_out, lse, delta),
        *(grad_query, grad_keys, lse if summed is None else summed),
        *(rows, key_value.shape[1], heads, indices.shape[2]),
        *(*query.stride()[:3], *key_value.stride()[:2], *grad_out.stride()[:3]),
        *(softmax_scale, softmax_scale * LOG2E),
        WITH_SUM=summed is not None,
        num_warps=4,
        maxnreg=256,
    )
    grad_keys.copy_(in_order(grad_keys))


def in_order(grad_keys: Tensor) -> Tensor:
    """Return ``[keys, 576]`` with its columns in order.

    Args:
        grad_keys: as ``hopper_backward_rows_kernel`` leaves them: of 16 columns those that one of four
            threads of a product has are beside each other, two and the two that are 8 behind.
    """
    return grad_keys.view(len(grad_keys), -1, 4, 2, 2).transpose(2, 3).reshape(grad_keys.shape)


def _multiprocessors(device: torch.device) -> int:
    """Programs that run at once; any number where none runs."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
