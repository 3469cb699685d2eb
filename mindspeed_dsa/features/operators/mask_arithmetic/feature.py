"""``mask-arithmetic``: a vocabulary that is split over ranks, without assignments through masks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.feature import Feature, Requires
from mindspeed_dsa.features.operators.selection import FUSED_OPERATORS, check_selection, selects
from mindspeed_dsa.megatron import releases
from mindspeed_dsa.patches.spec import Patch


def check_mask_arithmetic(args: Any, options: Any) -> Iterator[str]:
    """What in a job's arguments does not go with mask arithmetic."""
    yield from check_selection(args, "mask-arithmetic")


_IMPL = "mindspeed_dsa.features.operators.mask_arithmetic.filling"
_WHY = "an assignment through a mask lists the places where it is true, for which the host waits"

FEATURE = Feature(
    name="mask-arithmetic",
    summary="Vocabulary parallel embedding and cross entropy fill by a mask instead of assigning through it: "
    "the same bits without waiting for the device.",
    flags=(FUSED_OPERATORS,),
    patches=(
        Patch(
            "megatron.core.tensor_parallel.layers:VocabParallelEmbedding.forward",
            "wrap",
            f"{_IMPL}:fill_by_mask",
            _WHY,
            params=("input_",),
            versions=releases.SERVED,
        ),
        Patch(
            "megatron.core.tensor_parallel.cross_entropy:VocabParallelCrossEntropy.calculate_predicted_logits",
            "wrap",
            f"{_IMPL}:fill_by_mask",
            _WHY,
            params=("vocab_parallel_logits", "target"),
            versions=releases.SERVED,
        ),
    ),
    requires=Requires(versions={"megatron-core": releases.SERVED}),
    active=selects("mask-arithmetic"),
    check=check_mask_arithmetic,
    doc="fused-operators.md",
)
