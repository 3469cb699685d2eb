"""Products with the keys that were gathered for a tile of rows: scores, sums of keys, gradients of keys.

Heads are few beside the selected keys. The kernels of ``cpu_kernel.py`` take the keys in the order in which
they were gathered, as the first operand of the transposed scores, so that only what is as small as the heads
is laid out anew. In bf16 the sums of keys take them in pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_dsa.ops.cpu_blocks import Scratch
from mindspeed_dsa.ops.cpu_kernel import block_product, has_kernel, pairs_of_rows
from mindspeed_dsa.ops.cpu_products import linear, one_by_one, product

# With fewer rows a kernel's vectors are mostly empty.
_FEWEST_ROWS = 8


def scores_with(keys: Tensor, query: Tensor, out: Tensor, scratch: Scratch, scale: float = 1.0) -> None:
    """``scale * (query @ keys.mT)``.

    Args:
        keys: ``[n, width, dim]``.
        query: ``[n, m, dim]`` in the same dtype.
        out: ``[n, m, width]``.
        scratch: for intermediate results.
        scale: factor.
    """
    n, m, dim = query.shape
    if not _takes(query.dtype, m, dim):
        product(query, keys.mT, out, scale)
        return
    # [n, dim, m], of bf16 [n, dim / 2, m, 2]: its pairs are neighbours already.
    if query.dtype == torch.bfloat16:
        whole = scratch("transposed query", n, dim // 2, m, dtype=torch.int32)
        # Copied, because a view may begin between two such integers.
        rows = scratch("query in rows", n, m, dim, dtype=query.dtype).copy_(query)
        whole.copy_(rows.view(torch.int32).transpose(1, 2))
        turned = whole.view(query.dtype).view(n, dim // 2, m, 2)
    else:
        turned = scratch("transposed query", n, dim, m, dtype=query.dtype).copy_(query.transpose(1, 2))
    found = scratch("transposed scores", n, keys.shape[1], m)
    block_product(keys, turned, found)
    torch.mul(found.transpose(1, 2), scale, out=out)


def sums_of(keys: Tensor, weights: Tensor, out: Tensor, scratch: Scratch) -> None:
    """``weights @ keys``.

    Args:
        keys: ``[n, width, dim]``, contiguous.
        weights: ``[n, m, width]`` in the same dtype.
        out: ``[n, m, dim]``.
        scratch: for intermediate results.
    """
    if _takes(keys.dtype, weights.shape[1], keys.shape[1]):
        block_product(weights, _second_operand(keys, scratch, "keys"), out)
    else:
        product(weights, keys, out)


def add_to_keys(total: Tensor, indices: Tensor, a: Tensor, b: Tensor, scratch: Scratch) -> None:
    """Add ``a[i].mT @ b[i]``, one row per selected key, to the keys' rows of ``total``, in a fixed order.

    Args:
        total: ``[key_length, dim]``.
        indices: ``[n, width]`` int64, which rows.
        a: ``[n, m, width]``; zero in the columns of invalid entries.
        b: ``[n, m, dim]``, contiguous.
        scratch: where the products may lie.
    """
    n, m, width = a.shape
    if _takes(a.dtype, m, m):
        products = scratch("products", n, width, b.shape[2])
        turned = scratch("transposed slopes", n, width, m, dtype=a.dtype).copy_(a.transpose(1, 2))
        block_product(turned, _second_operand(b, scratch, "rows"), products)
        total.index_add_(0, indices.flatten(), products.flatten(0, 1))
    elif one_by_one(2 * m * width * b.shape[2], a.dtype):
        for i in range(n):
            total.index_add_(0, indices[i], linear(a[i].t(), b[i].t()))
    elif a.dtype == torch.bfloat16:
        products = scratch("products", width, b.shape[2])
        for i in range(n):
            product(a[i].t(), b[i], products)
            total.index_add_(0, indices[i], products)
    else:
        products = scratch("products", n, width, b.shape[2])
        product(a.transpose(1, 2), b, products)
        total.index_add_(0, indices.flatten(), products.flatten(0, 1))


def _takes(dtype: torch.dtype, rows: int, summands: int) -> bool:
    even = dtype != torch.bfloat16 or summands % 2 == 0
    return rows >= _FEWEST_ROWS and even and has_kernel(dtype)


def _second_operand(x: Tensor, scratch: Scratch, name: str) -> Tensor:
    """``[n, k, columns]``, contiguous, as a kernel takes it."""
    if x.dtype != torch.bfloat16:
        return x
    n, k, columns = x.shape
    pairs, apart = (
        scratch(f"{name} {what}", n * k // 2, columns, dtype=torch.int32) for what in ("in pairs", "apart")
    )
    return pairs_of_rows(x.flatten(0, 1), pairs, apart).view(n, k // 2, columns, 2)
