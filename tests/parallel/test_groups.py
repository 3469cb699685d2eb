"""All members find a group that only they make, whatever other groups a rank is in."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mindspeed_dsa.parallel.groups import subgroup


def rank_of(rank: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    parent = dist.new_group([0, 1], timeout=timedelta(minutes=77))
    if rank == 0:  # like the groups of embeddings that the first stage of a pipeline has
        for _ in range(2):
            dist.new_group([0], use_local_synchronization=True)
    for _ in range(2):
        total, group = torch.tensor([rank + 1.0]), subgroup(parent, [0, 1])
        dist.all_reduce(total, group=group)
        assert total.item() == 3
        # The timeout is the one of Megatron's groups, --distributed-timeout-minutes.
        assert group._get_backend(total.device).options._timeout == timedelta(minutes=77)
    dist.destroy_process_group()


def test_members_find_each_other(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    context = mp.spawn(rank_of, args=(f"file://{tmp_path}/rendezvous",), nprocs=2, join=False)
    deadline = time.monotonic() + 120
    while not context.join(timeout=5):
        assert time.monotonic() < deadline, "a member waits for the others"
