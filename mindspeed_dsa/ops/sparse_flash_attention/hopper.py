"""Selection and launch of the Hopper-only, warp-specialized kernels.

The kernels are written in Gluon, which exposes warp groups and changes between Triton releases. With untested
Triton releases, and for other sizes, dtypes and GPUs, the plain Triton kernels compute the same function.
"""

from __future__ import annotations

import torch
import triton
from packaging.version import Version
from torch import Tensor

from mindspeed_dsa import log
from mindspeed_dsa.ops.sparse_flash_attention.shared_tiles import MOST_ENTRIES
from mindspeed_dsa.ops.triton.common import LOG2E, block, interpreted
from mindspeed_dsa.ops.triton.launch import HOPPER, capability_of, on_grid

_log = log.get("ops")
# Triton releases whose Gluon compiles the kernels, first and last.
_GLUON = ((3, 7), (3, 9))
HAS_GLUON = _GLUON[0] <= Version(triton.__version__).release[:2] <= _GLUON[1]
_VALUE_DIM, _DIM = 512, 576
# Heads per program: shared memory holds their queries and two tiles of keys.
# 64 heads x 576 x 2 bytes = 72 KiB, and 64 keys x 576 x 2 bytes = 72 KiB per tile: 216 KiB of 227 KiB.
HEADS = 64
# Up to this many heads, keys form the rows of products and heads the columns.
_FEW_HEADS = 16
# Maximum number of heads for the sum over heads, which reads each key once for all of them.
_SUMMED_HEADS = 128
# 4 warps form the first multiplying warp group; the kernels add a second one and one that copies. They
# redistribute the 168 registers per thread among the groups.
_OPTIONS = {"num_warps": 4, "maxnreg": 168}

if HAS_GLUON:
    from mindspeed_dsa.ops.sparse_flash_attention.hopper_attention_sum import hopper_attention_sum_kernel
    from mindspeed_dsa.ops.sparse_flash_attention.hopper_backward import hopper_backward_keys_kernel
    from mindspeed_dsa.ops.sparse_flash_attention.hopper_backward_few_heads import (
        hopper_backward_few_heads_kernel,
    )
    from mindspeed_dsa.ops.sparse_flash_attention.hopper_backward_rows import hopper_backward_rows_kernel
    from mindspeed_dsa.ops.sparse_flash_attention.hopper_few_heads import hopper_few_heads_forward_kernel
    from mindspeed_dsa.ops.sparse_flash_attention.hopper_forward import hopper_forward_kernel


def takes(query: Tensor, key_value: Tensor, value_dim: int) -> bool:
    """Return whether :func:`forward` supports these operands, whose last dimensions must be contiguous."""
    return (
        HAS_GLUON
        and not interpreted()
        and capability_of(query.device) == HOPPER
        and query.dtype in (torch.bfloat16, torch.float16)
        and (value_dim, query.shape[3]) == (_VALUE_DIM, _DIM)
        and _in_lines(query)
        and _in_lines(key_value)
    )


def warn_of_plain_kernels() -> None:
    """Warn once if this Triton release does not compile the kernels of this module."""
    if not HAS_GLUON:
        _log.warning(
            "sparse attention runs on plain Triton kernels, which are slower on this GPU: those for Hopper "
            "need triton %s to %s, and %s is installed; torch 2.12 and later install such a release",
            *(".".join(map(str, release)) for release in _GLUON),
            triton.__version__,
            once=True,
        )


def takes_sum(query: Tensor, key_value: Tensor, value_dim: int) -> bool:
    """Return whether :func:`attention_sum` supports these operands."""
    return query.shape[2] <= _SUMMED_HEADS and takes(query, key_value, value_dim)


def _in_lines(tensor: Tensor) -> bool:
    """Return whether base address and strides are multiples of 16, so that 16-byte copies are aligned."""
    return tensor.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in tensor.stride()[:-1])


def takes_backward(query: Tensor, key_value: Tensor, grad_out: Tensor, value_dim: int, topk: int) -> bool:
    """Return whether :func:`gradients_of_keys` supports these operands."""
    return topk <= MOST_ENTRIES and takes(query, key_value, value_dim) and _in_lines(grad_out)


def backward_heads(heads: int) -> int:
    """Return the number of heads per tile of queries and output gradients."""
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
    """Write output and log-sum-exp of ``[batch, rows, heads, 576]`` queries into ``out`` and ``lse``.

    ``indices`` is ``[batch, rows, topk]`` int32, contiguous; ``lengths`` is ``[batch * rows]`` int32, one
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
        on_grid(hopper_forward_kernel, batch * rows * triton.cdiv(heads, HEADS))(*arguments, **_OPTIONS)


def attention_sum(
    query: Tensor,
    key_value: Tensor,
    indices: Tensor,
    lengths: Tensor,
    lse: Tensor,
    softmax_scale: float,
    summed: Tensor,
) -> None:
    """Write the probabilities summed over heads into ``summed``, fp32 and of the shape of ``indices``."""
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
    """Compute the gradients of keys and scores for some rows, like ``backward_keys_kernel``.

    Args:
        inputs: query, keys, gradient of the output, log-sum-exp and delta.
        results: three tensors. Gradients of scores, ``[at least rows, topk, heads]`` in the order of the
            tiles, with heads padded to a multiple of :func:`backward_heads`. Sum over heads,
            ``[batch, rows, topk]`` fp32, or None. Gradients of keys, fp32, ``[batch * key_length, dim]`` or
            ``[at least rows, topk, dim]``.
        tiles: four tensors. ``indices`` and ``places`` of :class:`SharedTiles`, ``[rows, topk]`` each; all
            tasks; and the first and end task of these rows.
        first: batch-wide number of the first row.
        softmax_scale: factor of the scores.
        atomic: whether to add to ``[batch * key_length, dim]`` with atomics. Otherwise each valid entry
            writes its own row of the gradients of keys, except entries for which :func:`added_by_others` is
            True.
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
    """Return whether :func:`gradients_of_rows` supports these operands.

    Operands must have up to 128 heads. Then at most two programs add to each sum of probabilities over
    heads, so the order of the atomic additions does not change it.
    """
    return query.shape[2] <= _SUMMED_HEADS and takes(query, key_value, value_dim) and _in_lines(grad_out)


def prefers_rows(heads: int, deterministic: bool) -> bool:
    """Return whether the model bounds :func:`gradients_of_rows` by less time, and a GPU has run its kernel.

    With 17 to 32 heads the model bounds its time by less, but no GPU has run its kernel for up to 32 heads.
    In a fixed order a gradient per entry passes through memory, and a tile has fewer if rows share it.
    """
    return not deterministic and heads > HEADS // 2


def gradients_of_rows(
    inputs: tuple[Tensor, ...],
    results: tuple[Tensor, Tensor, Tensor | None],
    indices: Tensor,
    lengths: Tensor,
    rows: range,
    softmax_scale: float,
    ordered: bool,
) -> None:
    """Compute all gradients of some rows.

    Args:
        inputs: query, keys, gradient of the output, log-sum-exp and delta.
        results: three tensors. Gradients of queries, ``[batch * rows, heads, 576]``. Gradients of keys, fp32,
            columns in the order that :func:`in_order` undoes. Sum over heads, ``[batch * rows, topk]`` fp32,
            zeroed, or None.
        indices: key positions, ``[batch * rows, topk]`` int32, contiguous.
        lengths: one past the last key entry of each row, as for :func:`forward`.
        rows: batch-wide numbers of the rows.
        softmax_scale: factor of the scores.
        ordered: whether the gradients of keys are ``[len(rows), topk, 576]``, one for each entry that is a
            key, zeroed before if :func:`adds_to_entries`. Then ``indices`` and the other results are of
            ``rows`` alone. Otherwise gradients of keys are ``[batch * key_length, 576]``, and are added to
            with atomics, in no fixed order.
    """
    query, key_value, grad_out, lse, delta = inputs
    grad_query, grad_keys, summed = results
    heads = query.shape[2]
    arguments = (
        *(query, key_value, indices, lengths, grad_out, lse, delta),
        *(grad_query, grad_keys, lse if summed is None else summed),
        *(rows.start, query.shape[1], key_value.shape[1], heads, indices.shape[1]),
        *(*query.stride()[:3], *key_value.stride()[:2], *grad_out.stride()[:3]),
        *(softmax_scale, softmax_scale * LOG2E),
    )
    atomic = not ordered or adds_to_entries(heads)
    options: dict[str, int] = {"WITH_SUM": summed is not None, "ORDERED": ordered, "ATOMIC": atomic}
    options |= {"num_warps": 4, "maxnreg": 256}
    if heads <= HEADS // 2:
        on_grid(hopper_backward_few_heads_kernel, len(rows))(*arguments, HEADS=block(heads), **options)
    else:
        on_grid(hopper_backward_rows_kernel, len(rows) * triton.cdiv(heads, HEADS))(*arguments, **options)


def adds_to_entries(heads: int) -> bool:
    """Return whether :func:`gradients_of_rows` adds to the gradients of entries, instead of storing them.

    With more than 64 heads two programs add, and their order does not change a sum that starts at zero. With
    17 to 32 heads stores would make the compiler serialise the products: registers do not suffice.
    """
    return heads > HEADS or _FEW_HEADS < heads <= HEADS // 2


def in_order(grad_keys: Tensor) -> Tensor:
    """Restore the column order of ``[keys, 576]`` key gradients.

    Args:
        grad_keys: gradients in the column order of :func:`gradients_of_rows`. Within every 16 columns, its
            kernels place the four columns of one thread (``2i``, ``2i + 1``, ``2i + 8``, ``2i + 9``) next to
            each other.
    """
    # [keys, 36, thread, half, number] -> [keys, 36, half, thread, number] -> [keys, 576]
    return grad_keys.view(len(grad_keys), -1, 4, 2, 2).transpose(2, 3).reshape(grad_keys.shape)


def _multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors; 1 on devices where the kernels are only compiled."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
