"""The Triton kernels of the grouped matmul, interpreted, against one product per group."""

from __future__ import annotations

import pytest
import torch

from tests.ops.grouped_cases import LAYOUTS, SIZES, check
from tests.ops.triton_backend import DEVICE, grouped

WIDE = {"width_in": 80, "width_out": 136}  # several tiles, the last of them partial


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_forward_and_gradients(dtype, layout):
    for name in ("uneven", "one row", "no rows"):
        check("triton", SIZES[name], dtype, layout, device=DEVICE)
    check("triton", [70, 0, 3], dtype, layout, device=DEVICE, **WIDE)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("dtype", "main_grad"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
def test_gradients_are_added_to_what_is_there(dtype, main_grad, layout):
    check("triton", [70, 0, 3], dtype, layout, main_grad, device=DEVICE, **WIDE)


def test_many_groups():
    check("triton", [index % 2 for index in range(100)], torch.float32, "kn", device=DEVICE)


def test_more_groups_than_a_program_can_hold_are_refused():
    from mindspeed_dsa.ops.backend import ShapeClass

    shape = ShapeClass(DEVICE, torch.float32, (("groups", 1025), ("in", 8), ("out", 8)))
    assert "at most 1024 groups" in grouped.unsupported(shape)
