"""Write reference.json: losses and gradients of Megatron-core 0.16.1's DSA with the repairs on.

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
    """Return a gradient's norm, and its dot product with a fixed random vector."""
    # The vector has no zeros, so that the product depends on every entry.
    generator = torch.Generator().manual_seed(gradient.numel())
    direction = torch.randn(gradient.shape, generator=generator, dtype=torch.float64)
    return [float(gradient.double().norm()), float((gradient.double() * direction).sum())]


def summary(step: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a step's result that is stored."""
    return {
        "losses": step["losses"],
        "indexer loss": step["indexer loss"],
        "gradients": {name: figures(gradient) for name, gradient in step["gradients"].items()},
    }


def write(file: Path, cases: dict[str, dict[str, Any]]) -> None:
    """Run a step of each case in one process, and write the results."""
    from tests.matrix import model
    from tests.support import worker

    summaries = {}
    for name, overrides in cases.items():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        # The default modules only fuse norms into linear layers: the same values under other names.
        step = model.one_step(overrides={"transformer_impl": "local", **overrides}, num_microbatches=2)
        summaries[name] = summary(step)
        worker.forget_everything()
    content = {"megatron-core": metadata.version("megatron-core"), "cases": summaries}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(FILE, CASES)
