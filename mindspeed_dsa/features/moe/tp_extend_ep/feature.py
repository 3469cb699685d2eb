"""Tensor parallel ranks become expert parallel ranks for the experts."""

from __future__ import annotations

from mindspeed_dsa.feature import Feature, Flag
from mindspeed_dsa.features.moe.tp_extend_ep.arguments import extend
from mindspeed_dsa.features.moe.tp_extend_ep.validation import check_tp_extend_ep
from mindspeed_dsa.megatron import across_layouts
from mindspeed_dsa.megatron.configuration import validate

FEATURE = Feature(
    name="moe-tp-extend-ep",
    summary="Gives the tensor parallel ranks whole experts: expert parallel over TP x EP ranks, no expert "
    "tensor parallelism.",
    flags=(
        Flag(
            "--moe-tp-extend-ep",
            "Spread the experts over TP x EP ranks instead of slicing each over TP of them.",
        ),
    ),
    patches=across_layouts.ROWS,
    rewrite=extend,
    validate=validate(check_tp_extend_ep),
    on_finalize="mindspeed_dsa.features.moe.tp_extend_ep.validation:require_whole_experts",
    doc="moe-tp-extend-ep.md",
)
