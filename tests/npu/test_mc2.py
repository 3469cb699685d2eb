"""MC2: linear layers with torch_npu's operators of matmul and collective, compared with the whole product."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mindspeed_dsa.features.tensor_parallel.overlap import mc2
from mindspeed_dsa.features.tensor_parallel.overlap.autograd import Column, Plan, Row
from tests.npu import ranks as rank_processes
from tests.ops import oracle

TOLERANCE = 8e-3  # bf16
SEQUENCE, BATCH, HIDDEN, INNER = 6, 2, 512, 768


def test_two_ranks_equal_one(tmp_path):
    rank_processes.run(_check_rank, 2, tmp_path)


def _check_rank(rank, ranks):
    from tests.npu import collective_kernels, kernels, refusals

    kernels.register()
    with mock.patch.object(mc2, "communicator", collective_kernels.communicator), refusals.hccl():
        for frozen in (False, True):
            for keep in (False, True):
                _column(rank, ranks, frozen, keep)
            _row(rank, ranks, frozen)
    gather, scatter = "npu_all_gather_base_mm", "npu_mm_reduce_scatter_base"
    # If the input is gathered again, its gradient is multiplied and scattered at the same time.
    trained = [gather, gather, scatter, scatter, gather]
    assert collective_kernels.calls == [*trained, *[gather, scatter] * 2, scatter, gather]


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _megatron(module):
    """Return a Megatron whose buffer for gathered rows is NaN: old contents must not be used."""
    buffers = SimpleNamespace(get_tensor=lambda shape, dtype, name: torch.full(shape, torch.nan, dtype=dtype))
    return SimpleNamespace(get_global_memory_buffer=lambda: buffers)


def _plan(keep=False):
    return Plan(mc2, dist.group.WORLD, _megatron, sequence_parallel=True, keep_gathered=keep)


def _column(rank, ranks, frozen, keep):
    whole_input, whole_weight = _noise(1, SEQUENCE, BATCH, HIDDEN), _noise(2, INNER, HIDDEN)
    whole_grad = _noise(3, SEQUENCE, BATCH, INNER)
    input = whole_input.chunk(ranks)[rank].clone().requires_grad_()
    weight = whole_weight.chunk(ranks)[rank].clone().requires_grad_(not frozen)
    bias = _noise(4, INNER).chunk(ranks)[rank].clone().requires_grad_(not frozen)
    output = Column.apply(input, weight, bias, _plan(keep))
    output.backward(whole_grad.chunk(ranks, dim=-1)[rank])

    expected = whole_input.float() @ whole_weight.float().t() + _noise(4, INNER).float()
    _require(output, expected.chunk(ranks, dim=-1)[rank])
    _require(input.grad, (whole_grad.float() @ whole_weight.float()).chunk(ranks)[rank])
    if frozen:
        assert weight.grad is None
    else:
        flat = whole_grad.float().flatten(0, 1)
        _require(weight.grad, (flat.t() @ whole_input.float().flatten(0, 1)).chunk(ranks)[rank])
        _require(bias.grad, flat.sum(0).chunk(ranks)[rank])


def _row(rank, ranks, frozen):
    whole_input, whole_weight = _noise(5, SEQUENCE, BATCH, INNER), _noise(6, HIDDEN, INNER)
    whole_grad = _noise(7, SEQUENCE, BATCH, HIDDEN)
    input = whole_input.chunk(ranks, dim=-1)[rank].clone().requires_grad_()
    weight = whole_weight.chunk(ranks, dim=-1)[rank].contiguous().requires_grad_(not frozen)
    output = Row.apply(input, weight, _plan())
    output.backward(whole_grad.chunk(ranks)[rank])

    _require(output, (whole_input.float() @ whole_weight.float().t()).chunk(ranks)[rank])
    grad_input = whole_grad.float() @ whole_weight.float()
    _require(input.grad, grad_input.chunk(ranks, dim=-1)[rank])
    if frozen:
        assert weight.grad is None
    else:
        flat = whole_grad.float().flatten(0, 1)
        grad_weight = flat.t() @ whole_input.float().flatten(0, 1)
        _require(weight.grad, grad_weight.chunk(ranks, dim=-1)[rank])


def _require(actual, expected):
    assert oracle.relative_error(actual, expected) < TOLERANCE


@pytest.mark.usefixtures("npu_kernels")
@pytest.mark.parametrize(
    ("shape", "dtype", "ranks", "reason"),
    [
        ((512, 512), torch.bfloat16, 2, ""),
        ((256, 65534), torch.float16, 8, ""),
        ((512, 512), torch.float32, 2, "fp16 and bf16, not float32"),
        ((512, 512), torch.bfloat16, 3, "2, 4 or 8 ranks on this device, Atlas A2, not 3"),
        ((512, 512), torch.bfloat16, 16, "2, 4 or 8 ranks on this device, Atlas A2, not 16"),
        ((512, 255), torch.bfloat16, 2, "widths of 256 to 65534, not 255"),
        ((65535, 512), torch.bfloat16, 2, "widths of 256 to 65534, not 65535"),
    ],
)
def test_layers_that_the_operators_do_not_take(shape, dtype, ranks, reason):
    weight = torch.empty(shape, dtype=dtype, device="meta")
    said = mc2.declines(weight, SimpleNamespace(size=lambda: ranks))
    assert reason in said
    assert bool(said) == bool(reason)


@pytest.mark.usefixtures("npu_kernels")
def test_ranks_of_another_product(monkeypatch):
    monkeypatch.setattr("torch.npu.get_device_name", lambda device=None: "Ascend910_9391")
    weight = torch.empty(512, 512, dtype=torch.bfloat16, device="meta")
    groups = [SimpleNamespace(size=lambda ranks=ranks: ranks) for ranks in range(2, 65)]
    assert [group.size() for group in groups if not mc2.declines(weight, group)] == [2, 4, 8, 16, 32]


def test_a_product_too_large_for_the_operator_is_scattered_by_a_collective(monkeypatch):
    taken = []
    monkeypatch.setattr(mc2, "_torch_npu", lambda: pytest.fail("4 GiB at most"))
    monkeypatch.setattr(mc2.chunked, "matmul_scatter", lambda *given: taken.append(given))
    whole = torch.empty(1 << 17, 512, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(512, (1 << 14) + 1, dtype=torch.bfloat16, device="meta")
    mc2.matmul_scatter(whole, weight, None, 4)
    assert taken == [(whole, weight, None, 1)]


def test_the_communicator_is_asked_for_by_global_rank():
    """As in torch_npu's manual: the device's process group, with this rank's number in the world."""
    import torch_npu  # noqa: F401

    backend = SimpleNamespace(get_hccl_comm_name=lambda rank: f"hccl of {rank}")

    class Group:
        def _get_backend(self, device):
            assert device.type == "npu"
            return backend

    with (
        mock.patch.object(dist, "get_rank", return_value=1),
        mock.patch.object(dist, "get_global_rank", lambda group, rank: 4 + rank),
    ):
        assert mc2.communicator(Group()) == "hccl of 5"


def test_torch_npu_names_communicators_so():
    import torch_npu

    assert callable(torch_npu._C._distributed_c10d.ProcessGroupHCCL.get_hccl_comm_name)
