"""The indexer's weights stay one model on all tensor parallel ranks, at the right gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_dsa.features.attention.declare import DSA, HERE, dsa_repair
from mindspeed_dsa.patches.spec import Patch


def average_over_tensor_parallel_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the indexer's parameters for Megatron's average over tensor parallel ranks.

    The indexer sees the gathered sequence, and its target is summed over all heads: each rank holds the
    complete gradient. The mark outranks ``sequence_parallel``, which would sum these copies.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for parameter in self.parameters():
            parameter.average_gradients_across_tp_domain = True

    return __init__


FEATURE = dsa_repair(
    "dsa-indexer-tp-grads",
    summary="Averages the indexer's gradients over tensor parallel ranks instead of adding them up.",
    switch_help="Average the indexer's gradients over tensor parallel ranks.",
    patches=(
        Patch(
            f"{DSA}:DSAIndexer.__init__",
            "wrap",
            f"{HERE}.indexer_tp_grads:average_over_tensor_parallel_ranks",
            "every rank computes the whole gradient, and sequence parallelism multiplies it by their number",
            versions=">=0.16,<0.19",
        ),
    ),
)
FEATURES = (FEATURE,)
