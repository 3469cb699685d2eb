"""How many tokens each expert and each rank got, in every MoE layer and step."""

from __future__ import annotations

from mindspeed_dsa.feature import Feature, Flag
from mindspeed_dsa.features.moe.load_report.options import Options
from mindspeed_dsa.features.moe.load_report.validation import check_load_report
from mindspeed_dsa.megatron import moe_layers
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.features.moe.load_report"

FEATURE = Feature(
    name="moe-router-load-report",
    summary="Writes how many tokens each expert, rank and pipeline stage got in each step.",
    flags=(
        Flag(
            "--moe-router-load-report",
            "Write tokens and imbalance (most loaded over mean) per layer, expert, rank and pipeline stage, "
            "step by step, to DIR/expert_load.jsonl and to TensorBoard, from the last rank.",
            kind="value",
            metavar="DIR",
        ),
    ),
    patches=(
        Patch(
            "megatron.core.transformer.moe.router:TopKRouter.forward",
            "wrap",
            f"{_HERE}.counting:count_tokens",
            "its routing map says which tokens each expert gets",
            params=("input",),
        ),
        *moe_layers.rows(f"{_HERE}.counting", "layers are counted by their number in the whole model"),
        Patch(
            "megatron.training.training:training_log",
            "wrap",
            f"{_HERE}.steps:record_after_log",
            "every rank comes here once per step, and TensorBoard's writer is at hand",
            params=("iteration",),
            required=False,
        ),
    ),
    options=Options.of,
    validate=check_load_report,
    on_finalize=f"{_HERE}.steps:require_loop",
    doc="moe-router-load-report.md",
)
