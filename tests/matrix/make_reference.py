"""Writes reference.json: losses and gradients of Megatron-core 0.16.1's own DSA, its repairs on.

python -m tests.matrix.make_reference
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FILE = Path(__file__).with_name("reference.json")
CASES: dict[str, dict[str, Any]] = {
    "sparse loss": {},
    "dense loss": {"dsa_indexer_use_sparse_loss": False},
    "topk above the sequence": {"dsa_indexer_topk": 64},
    "no query compression": {"q_lora_rank": None},
}


def figures(gradient: Tensor) -> list[float]:
    """Norm of a gradient, and its product with a fixed random direction, which sees every entry."""
    generator = torch.Generator().manual_seed(gradient.numel())
    direction = torch.randn(gradient.shape, generator=generator, dtype=torch.float64)
    return [float(gradient.double().norm()), float((gradient.double() * direction).sum())]


def summary(step: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a step."""
    return {
        "losses": step["losses"],
        "indexer loss": step["indexer loss"],
        "gradients": {name: figures(gradient) for name, gradient in step["gradients"].items()},
    }


def write(file: Path, cases: dict[str, dict[str, Any]]) -> None:
    """Take a step of each case, in one process, and keep what comes out."""
    from tests.matrix import model
    from tests.support import worker

    found = {}
    for name, overrides in cases.items():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        # Its own modules only have norms and linear layers in one: the same values in another order.
        step = model.one_step(overrides={"transformer_impl": "local", **overrides}, num_microbatches=2)
        found[name] = summary(step)
        worker.forget_everything()
    content = {"megatron-core": metadata.version("megatron-core"), "cases": found}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(FILE, CASES)
