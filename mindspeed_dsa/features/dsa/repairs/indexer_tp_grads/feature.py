"""Correct gradients for the indexer, whose weights stay equal on all tensor parallel ranks."""

from __future__ import annotations

from mindspeed_dsa.megatron.dsa import DSA, dsa_repair
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.features.dsa.repairs.indexer_tp_grads"

FEATURE = dsa_repair(
    "dsa-indexer-tp-grads",
    summary="Averages the indexer's gradients over tensor parallel ranks instead of summing them.",
    switch_help="Average the indexer's gradients over tensor parallel ranks.",
    patches=(
        Patch(
            f"{DSA}:DSAIndexer.__init__",
            "wrap",
            f"{_HERE}.averaging:average_over_tensor_parallel_ranks",
            "every rank computes the full gradient, and sequence parallelism sums these copies",
            versions=">=0.16,<0.19",
        ),
    ),
)
