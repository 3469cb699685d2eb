"""HCCL only reduces integers, fp16, bf16 and fp32; no feature reduces other types."""

from __future__ import annotations

import ast
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import mindspeed_dsa
from mindspeed_dsa.features.diagnostics.steps import metrics
from mindspeed_dsa.megatron import measured
from tests.support.sources import nodes_of
from tests.support.stand_in import measures

FOLDER = Path(mindspeed_dsa.__file__).parent
# Operator backends of other devices.
ELSEWHERE = {"cpu", "triton", "hopper", "cuda"}
REDUCING = {"all_reduce", "reduce_scatter", "reduce_scatter_tensor", "_all_reduce_coalesced"}
WIDE = {"float64", "double"}


@contextmanager
def as_hccl(other_ranks):
    """Simulate a second rank's values in a maximum, and refuse fp64."""

    def all_reduce(tensor, op=None, group=None):
        assert tensor.dtype in (torch.int64, torch.int32, torch.float32), f"HCCL reduces no {tensor.dtype}"
        assert op == dist.ReduceOp.MAX
        tensor.copy_(torch.maximum(tensor, torch.tensor(other_ranks, dtype=tensor.dtype)))

    with (
        mock.patch.object(dist, "is_initialized", return_value=True),
        mock.patch.object(dist, "get_world_size", return_value=2),
        mock.patch.object(dist, "all_reduce", all_reduce),
    ):
        yield


@pytest.mark.parametrize("mine", [3, 2**53 + 2])
def test_the_largest_peak_of_memory_is_exact(mine):
    theirs = 2**53 + 1  # which no float64 holds
    with as_hccl(theirs):
        assert metrics._largest_over_ranks(mine) == max(mine, theirs)


@measures
def test_the_slowest_rank():
    with as_hccl(1e9):
        assert measured.slowest({"rows": 0.5}, None) == {"rows": 1e9}


def names_in(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id


def test_no_function_that_reduces_makes_fp64():
    wrong, seen = [], 0
    for file in FOLDER.rglob("*.py"):
        # platform/npu reduces Megatron's fp64 itself.
        apart = any(part in file.as_posix() for part in ("platform/cpu", "platform/npu/hccl"))
        if apart or {file.stem.partition("_")[0], file.parent.name} & ELSEWHERE:
            continue
        for node in nodes_of(file):
            if isinstance(node, ast.FunctionDef):
                names = set(names_in(node))
                seen += bool(names & REDUCING)
                if names & REDUCING and names & WIDE:
                    wrong.append(f"{file.relative_to(FOLDER)}: {node.name}")
    assert seen > 10
    assert not wrong, "HCCL refuses to reduce fp64"
