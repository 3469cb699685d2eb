"""Ranks as separate processes over gloo, for tests that need torch_npu in each of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(function: Callable[[int, int], None], ranks: int, folder: Path) -> None:
    """Call ``function(rank, ranks)`` in ``ranks`` processes of one gloo group.

    Args:
        function: function that the processes can import.
        ranks: number of processes.
        folder: empty folder for the rendezvous.

    Raises:
        ProcessRaisedException: a process raised.
    """
    mp.spawn(_rank, args=(function, ranks, f"file://{folder}/rendezvous"), nprocs=ranks)


def _rank(rank: int, function: Callable[[int, int], None], ranks: int, rendezvous: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks)
    function(rank, ranks)
    dist.barrier()
    dist.destroy_process_group()
    # torch_npu's threads, without an NPU to wait for, may outlive the interpreter, whose exit then aborts.
    os._exit(0)
