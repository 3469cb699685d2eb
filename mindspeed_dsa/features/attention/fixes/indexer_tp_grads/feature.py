"""The indexer's weights stay one model on all tensor parallel ranks, at the right gradient."""

from __future__ import annotations

from mindspeed_dsa.features.attention.repairs import DSA, FIXES, dsa_repair
from mindspeed_dsa.patches.spec import Patch

FEATURE = dsa_repair(
    "dsa-indexer-tp-grads",
    summary="Averages the indexer's gradients over tensor parallel ranks instead of adding them up.",
    switch_help="Average the indexer's gradients over tensor parallel ranks.",
    patches=(
        Patch(
            f"{DSA}:DSAIndexer.__init__",
            "wrap",
            f"{FIXES}.indexer_tp_grads.averaging:average_over_tensor_parallel_ranks",
            "every rank computes the whole gradient, and sequence parallelism multiplies it by their number",
            versions=">=0.16,<0.19",
        ),
    ),
)
