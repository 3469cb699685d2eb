"""All members find a group that only they make, whatever other groups a rank is in."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from mindspeed_dsa.parallel.groups import subgroup


def make_groups() -> None:
    """Run one rank's part."""
    rank = dist.get_rank()
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


def test_members_find_each_other(pool):
    pool.run("tests.parallel.test_groups:make_groups", 2, timeout_s=120)
