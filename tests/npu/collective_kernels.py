"""CPU kernels of torch_npu's operators of matmul and collective, over gloo, written from the manuals.

The manuals' limits raise. Groups are known by names from :func:`communicator`, like HCCL's communicators.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.npu.refusals import require_idle

_groups: dict[str, Any] = {}
calls: list[str] = []


def communicator(group: Any) -> str:
    """Name the group, and remember it by this name."""
    name = f"group of {dist.get_process_group_ranks(group)}"
    _groups[name] = group
    return name


def npu_all_gather_base_mm(
    input: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    bias: Tensor | None = None,
    x1_scale: Tensor | None = None,
    x2_scale: Tensor | None = None,
    gather_index: int = 0,
    gather_output: bool = True,
    comm_turn: int = 0,
    output_dtype: Any = None,
    comm_mode: str | None = None,
) -> tuple[Tensor, Tensor]:
    _check(input, x2, hcom, world_size, bias, (x1_scale, x2_scale, output_dtype), comm_turn)
    assert gather_index == 0
    require_idle("npu_all_gather_base_mm", _groups[hcom])
    calls.append("npu_all_gather_base_mm")
    whole = torch.full((input.size(0) * world_size, input.size(1)), torch.nan, dtype=input.dtype)
    dist.all_gather_into_tensor(whole, input, group=_groups[hcom])
    return (whole.float() @ x2.float()).to(input.dtype), whole if gather_output else input.new_empty(0)


def npu_mm_reduce_scatter_base(
    input: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    x1_scale: Tensor | None = None,
    x2_scale: Tensor | None = None,
    comm_turn: int = 0,
    output_dtype: Any = None,
    comm_mode: str | None = None,
) -> Tensor:
    _check(input, x2, hcom, world_size, bias, (x1_scale, x2_scale, output_dtype), comm_turn)
    assert reduce_op == "sum"
    require_idle("npu_mm_reduce_scatter_base", _groups[hcom])
    assert input.size(0) % world_size == 0
    calls.append("npu_mm_reduce_scatter_base")
    mine = torch.full((input.size(0) // world_size, x2.size(1)), torch.nan)
    dist.reduce_scatter_tensor(mine, input.float() @ x2.float(), group=_groups[hcom])
    return mine.to(input.dtype)


def _check(
    input: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    bias: Tensor | None,
    quantised: tuple[Any, ...],
    turn: int,
) -> None:
    assert world_size == _groups[hcom].size()
    assert world_size in (2, 4, 8), "Atlas A2"
    assert input.dim() == x2.dim() == 2
    assert input.dtype == x2.dtype
    assert input.dtype in (torch.float16, torch.bfloat16)
    assert input.is_contiguous()
    assert x2.is_contiguous() or x2.t().is_contiguous()
    assert input.size(1) == x2.size(0)
    assert 256 <= input.size(1) < 65535
    assert bias is None
    assert quantised == (None, None, None)
    assert turn == 0
