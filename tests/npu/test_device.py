"""The stand-in device itself: values, waits, random numbers, collectives."""

from __future__ import annotations

import pytest

from tests.npu.device import launch


def run(tmp_path, code, ranks=1, **variables):
    script = tmp_path / "script.py"
    script.write_text(code)
    return launch.run(script, ranks=ranks, variables=variables).require_success().output


SINGLE = """
import torch
from tests.npu.device import counts

torch.manual_seed(3)
expected = torch.randn(3)
torch.npu.manual_seed(3)
assert torch.equal(torch.randn(3, device="npu").cpu(), expected)
state = torch.npu.get_rng_state()
first = torch.rand(5, device="npu")
torch.npu.set_rng_state(state)
assert torch.equal(first, torch.rand(5, device="npu"))
assert torch.equal(first, first.clone()) and not torch.equal(first, first + 1)

x = torch.arange(6.0, device="npu").view(2, 3)
w = torch.ones(3, 4, device="npu", dtype=torch.bfloat16, requires_grad=True)
(x.bfloat16() @ w).float().sum().backward()
assert w.grad.device.type == "npu"
assert torch.equal(w.grad.cpu(), torch.tensor([3.0, 5, 7]).bfloat16()[:, None].expand(3, 4))
assert torch.equal(x.t().contiguous().cpu(), torch.arange(6.0).view(2, 3).t())
assert torch.empty(4, device="npu").isnan().all()
assert str(x[0]) == "tensor([0., 1., 2.])", str(x[0])

with counts.counted() as found:
    torch.ones(4).pin_memory().to("npu", non_blocking=True)
    x.sum()
assert found.of("wait") == 0, found.table()
with counts.counted() as found:
    torch.ones(4).to("npu")
    x.sum().item()
    x[x > 1]
assert found.of("wait") == 3 and found.of("pageable") == 1, found.table()
assert found.of("wait", "script.py") == 3, found.table()
with counts.counted() as found:
    torch.tensor([1.0, 2.0], device="npu")
    event = torch.npu.Event()
    event.record()
    event.synchronize()
    x.sum()
    torch.npu.synchronize()
assert found.of("wait", "script.py") == 3 and found.of("pageable") == 1, found.table()
assert [name for what, name, _ in found.events if what == "wait"][1] == "Event.synchronize"
with counts.counted() as found:
    torch.special.i1(x)
    torch.cumsum(torch.ones(3, dtype=torch.int64, device="npu"), 0)
    torch.cumsum(torch.ones(3, dtype=torch.int32, device="npu"), 0, dtype=torch.int32)
assert found.of("fallback") == 1 and found.of("aicpu") == 1, found.table()
"""


def test_one_device(tmp_path):
    run(tmp_path, SINGLE)


SHARED = """
import torch
import torch.multiprocessing as mp
import torch_npu

def copy(queue, done):
    x = queue.get()
    x.copy_(torch.tensor([3.0, 4.0]))
    done.put(x.cpu().tolist())

if __name__ == "__main__":
    context = mp.get_context("spawn")
    queue, done = context.Queue(), context.Queue()
    x = torch.tensor([1.0, 2.0], device="npu")
    process = context.Process(target=copy, args=(queue, done))
    process.start()
    queue.put(x)
    assert done.get(timeout=100) == [3.0, 4.0]
    assert x.cpu().tolist() == [3.0, 4.0]
    process.join()
"""


def test_a_process_that_a_rank_spawns_has_its_memory(tmp_path):
    run(tmp_path, SHARED)


COLLECTIVES = """
import os
import torch
import torch.distributed as dist

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.npu.set_device(rank)
dist.init_process_group("hccl")

def on(values, dtype=torch.float32):
    return torch.as_tensor(values, dtype=dtype).npu()

def check(found, expected):
    assert found.cpu().tolist() == expected, (found.cpu(), expected)

total = sum(range(1, ranks + 1))
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
    x = on([rank + 1.0] * 3, dtype)
    dist.all_reduce(x)
    check(x, [total] * 3)
x = on([rank + 1.0])
dist.all_reduce(x, op=dist.ReduceOp.AVG)
check(x, [total / ranks])
x = on([rank == 0], torch.bool)
dist.all_reduce(x, op=dist.ReduceOp.MAX)
check(x, [True])
parts = [torch.empty(2, device="npu") for _ in range(ranks)]
dist.all_gather(parts, on([rank, rank]))
check(torch.cat(parts), [r for r in range(ranks) for _ in range(2)])
whole = torch.empty(ranks, device="npu")
dist.all_gather_into_tensor(whole, on([rank]))
check(whole, list(range(ranks)))
own = torch.empty(1, device="npu")
dist.reduce_scatter_tensor(own, on(range(ranks)))
check(own, [rank * ranks])
sizes = [1 + r for r in range(ranks)]
uneven = torch.empty((rank + 1) * ranks, device="npu")
dist.all_to_all_single(uneven, on([rank] * sum(sizes)), [rank + 1] * ranks, sizes)
check(uneven, [r for r in range(ranks) for _ in range(rank + 1)])
root = on([rank])
dist.broadcast(root, 1)
check(root, [1])
objects = [None] * ranks
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": r} for r in range(ranks)]
listed = [torch.empty(1, device="npu") for _ in range(ranks)] if rank == 0 else None
dist.gather(on([rank]), listed, 0)
assert rank or torch.cat(listed).cpu().tolist() == list(range(ranks))
got, sent = torch.empty(2, device="npu"), on([rank, rank])
ahead, behind = (rank + 1) % ranks, (rank - 1) % ranks
both = [dist.P2POp(dist.irecv, got, behind), dist.P2POp(dist.isend, sent, ahead)]
for work in dist.batch_isend_irecv(both):
    work.wait()
check(got, [behind] * 2)
# Sent after it has been received elsewhere: neither call waits for the other rank.
if rank < 2:
    late = torch.empty(2, device="npu")
    arrives = dist.irecv(late, 1 - rank) if rank else None
    leaves = dist.isend(sent, 1 - rank)
    arrives = arrives or dist.irecv(late, 1 - rank)
    arrives.wait()
    leaves.wait()
    check(late, [1 - rank] * 2)
try:
    dist.all_reduce(on([1], torch.float64))
except RuntimeError as error:
    assert "Unsupported data type" in str(error)
else:
    raise AssertionError("HCCL reduces no fp64")
if os.environ.get("STAND_IN_NPU_LAZY"):
    x = torch.empty(1, device="npu")
    work = dist.all_gather_into_tensor(wide := torch.empty(ranks, device="npu"), on([1]), async_op=True)
    assert wide.isnan().all()
    work.wait()
    assert not wide.isnan().any()
dist.barrier()
"""


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("lazy", [False, True])
def test_collectives(tmp_path, ranks, lazy):
    variables = {"STAND_IN_NPU_LAZY": "1"} if lazy else {}
    run(tmp_path, COLLECTIVES, ranks, TORCH_NPU_DEVICE_CAPABILITY="8.0", **variables)


OFFSETS = """
import torch
device = torch.device("npu:0")
torch.npu.manual_seed(3)
state = torch.npu.get_rng_state()
state[8:16] = torch.tensor([4096], dtype=torch.int64).view(torch.uint8)
torch.npu.set_rng_state(state)
one = torch.randn(8, device=device)
state[8:16] = torch.tensor([8192], dtype=torch.int64).view(torch.uint8)
torch.npu.set_rng_state(state)
assert not torch.equal(one.cpu(), torch.randn(8, device=device).cpu())
"""


def test_another_offset_draws_other_numbers(tmp_path):
    run(tmp_path, OFFSETS, 1)


def test_a_rank_that_fails_takes_the_others_with_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, time\nassert os.environ['RANK'] == '0', 'this rank'\ntime.sleep(100)\n")
    done = launch.run(script, ranks=2, limit=25)
    assert done.codes == (-9, 1)
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] failed(.|\n)*AssertionError: this rank"):
        done.require_success()
