"""Emulated refusals of a device: they do refuse, and our code makes no refused call."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mindspeed_dsa.features.diagnostics.steps import metrics
from mindspeed_dsa.features.memory.recompute_outputs.checkpoint import CheckpointWithoutOutput
from tests.npu.refusals import blocked_storages, hccl, in_blocks, require_idle


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """Yield a process group of one rank, over gloo."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_reductions_of_fp64(alone, monkeypatch):
    with hccl():
        with pytest.raises(RuntimeError, match=r"HCCL all_reduce: Unsupported data type torch\.float64"):
            dist.all_reduce(torch.zeros(1, dtype=torch.float64))
        dist.all_reduce(torch.zeros(1))
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        assert metrics._largest_over_ranks(2**53 + 1) == 2**53 + 1


def test_an_operator_beside_a_collective_in_flight(alone):
    with hccl():
        work = dist.all_reduce(torch.zeros(1), group=alone, async_op=True)
        with pytest.raises(AssertionError, match="npu_mm starts beside 1 collectives of its communicator"):
            require_idle("npu_mm", alone)
        work.wait()
        require_idle("npu_mm", alone)
    with pytest.raises(AssertionError, match="nobody has waited"), hccl():
        dist.all_reduce(torch.zeros(1), group=alone, async_op=True)


def test_storages_in_blocks_keep_their_size():
    """A layer's outputs are freed and recomputed, never a weight."""
    weight, x = torch.randn(32, 32, requires_grad=True), torch.randn(4, 32, requires_grad=True)
    expected = torch.autograd.grad((x.tanh() @ weight).sum(), (x, weight))
    with blocked_storages():
        in_blocks(weight)
        with pytest.raises(RuntimeError, match="internal format"):
            weight.untyped_storage().resize_(0)
        generators = SimpleNamespace(_get_all_rng_states=lambda: (torch.get_rng_state(),))
        again = CheckpointWithoutOutput(lambda name: generators, verify=False)
        hidden = again.checkpoint(torch.tanh, x)
        out = hidden @ weight
        again.discard_output_and_register_recompute(out)
        assert hidden.untyped_storage().nbytes() == 0
        out.sum().backward()
    assert x.grad.equal(expected[0])
    assert weight.grad.equal(expected[1])
