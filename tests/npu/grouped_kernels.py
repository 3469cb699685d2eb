"""CPU kernels of torch_npu's grouped matmuls, written from the manuals; the manuals' limits raise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

calls: list[tuple[Any, ...]] = []
"""Operator, group type, and for a weight whether it came as a transposed view."""


def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    **unused: Any,
) -> list[Tensor]:
    assert not any(value for name, value in unused.items() if name != "act_type"), unused
    (left,), (right,) = x, weight
    assert split_item in (2, 3), "one result"
    assert group_list_type == 0
    ends = _ends(group_list, left, right)
    if group_type == 0:
        # [rows, in] and [groups, in, out]
        assert right.dim() == 3
        assert left.is_contiguous()
        turned = not right.is_contiguous()
        assert not turned or right.transpose(1, 2).is_contiguous(), "neither a matrix nor a transposed one"
        calls.append(("npu_grouped_matmul", 0, turned))
        assert ends[-1] == len(left)
        parts = [left[a:z].float() @ w.float() for a, z, w in zip([0, *ends], ends, right, strict=False)]
        return [torch.cat(parts).to(left.dtype)]
    # [in, rows], which must be transposed, and [rows, out]
    assert group_type == 2
    assert right.dim() == 2
    assert left.T.is_contiguous()
    assert right.is_contiguous()
    calls.append(("npu_grouped_matmul", 2))
    parts = [left[:, a:z].float() @ right[a:z].float() for a, z in zip([0, *ends], ends, strict=False)]
    return [torch.stack(parts).to(left.dtype)]


def npu_grouped_matmul_add_(
    self: Tensor,
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    *,
    transpose_x: bool = True,
    transpose_weight: bool = False,
    group_type: int = 2,
    group_list_type: int | None = 0,
) -> Tensor:
    assert transpose_x
    assert not transpose_weight
    assert (group_type, group_list_type) == (2, 0)
    assert self.dtype == torch.float32
    assert self.is_contiguous()
    assert x.dim() == weight.dim() == 2
    ends = _ends(group_list, x, weight)
    calls.append(("npu_grouped_matmul_add_",))
    for one, a, z in zip(self, [0, *ends], ends, strict=False):
        one += x[a:z].T.float() @ weight[a:z].float()
    return self


def _ends(group_list: Tensor | None, left: Tensor, right: Tensor) -> list[int]:
    assert group_list is not None
    assert group_list.dtype == torch.int64
    assert len(group_list) <= 1024
    assert left.dtype == right.dtype
    assert left.dtype in (torch.bfloat16, torch.float16)
    ends: list[int] = group_list.tolist()
    assert ends == sorted(ends)
    return ends
