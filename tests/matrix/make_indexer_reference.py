"""Write indexer_reference.json: losses and gradients of Megatron-core 0.19's indexer for each option.

.venv-matrix/0.19.0/bin/python -m tests.matrix.make_indexer_reference
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.matrix.make_reference import write

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


if __name__ == "__main__":
    write(FILE, CASES)
