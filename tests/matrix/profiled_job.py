"""A small job with a loop of its own, for the command ``host-profile``: each step's losses go to a file."""

from __future__ import annotations

import json
import sys

import torch.distributed as dist

import mindspeed_dsa.megatron_adaptor  # noqa: F401  reads what the command sets
from tests.matrix.steps import steps

if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        for losses in steps():
            print(json.dumps(losses), file=file, flush=True)
