"""No indexer loss computation if the loss is not used."""

from __future__ import annotations

from mindspeed_dsa.megatron.dsa import DSA, dsa_repair
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.features.dsa.repairs.loss_gate"

FEATURE = dsa_repair(
    "dsa-loss-gate",
    summary="Skips the indexer loss if its coefficient is 0 or None, and in evaluation; the indexer's "
    "gradients are then zeros, so that overlapped gradient reduction completes.",
    switch_help="Skip the indexer loss where it is not used.",
    patches=(
        Patch(
            f"{DSA}:DSAttention.forward",
            "wrap",
            f"{_HERE}.gate:skip_unwanted_loss",
            "the loss is computed at coefficient 0, and a missing coefficient crashes",
            versions=">=0.16,<0.19",
        ),
        Patch(
            f"{DSA}:DSAIndexer.forward_with_scores",
            "wrap",
            f"{_HERE}.gate:score_without_graph",
            "the scores' graph is built and kept although it is not used",
            versions=">=0.16,<0.19",
        ),
        Patch(
            f"{DSA}:DSAttention.forward",
            "wrap",
            f"{_HERE}.gate:keep_indexer_gradients",
            "without the loss the indexer gets no gradients, and overlapped reduction waits for them",
            versions=">=0.19,<0.21",
        ),
    ),
)
