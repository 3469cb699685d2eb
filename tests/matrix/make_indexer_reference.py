"""Writes indexer_reference.json: losses and gradients of Megatron-core 0.19's own indexer, by its options.

.venv-matrix/0.19.0/bin/python -m tests.matrix.make_indexer_reference
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.matrix.make_reference import summary

FILE = Path(__file__).with_name("indexer_reference.json")
DEEPSEEK = {"dsa_indexer_rope_first": True, "dsa_indexer_normalised_query": True}
GLM = DEEPSEEK | {
    "dsa_indexer_rope_interleaved": True,
    "dsa_indexer_rotate_activation": False,
    "dsa_indexer_k_norm_epsilon": 1e-6,
}
CASES: dict[str, dict[str, Any]] = {
    "DeepSeek": DEEPSEEK,
    "GLM": GLM,
    "GLM with heads of no power of two": GLM | {"dsa_indexer_head_dim": 24},
    "without ReLU": DEEPSEEK | {"dsa_indexer_scoring_relu": False},
    "another epsilon": DEEPSEEK | {"dsa_indexer_k_norm_epsilon": 0.3},
}


def main() -> None:
    from tests.matrix import model
    from tests.support import worker

    found = {}
    for name, overrides in CASES.items():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        step = model.one_step(overrides={"transformer_impl": "local", **overrides}, num_microbatches=2)
        found[name] = summary(step)
        worker.forget_everything()
    content = {"megatron-core": metadata.version("megatron-core"), "cases": found}
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
