"""Report of the number of tokens that each expert and each rank gets, per MoE layer and step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_dsa.context_parallel.padding import Padding
from mindspeed_dsa.feature import Feature, Flag
from mindspeed_dsa.features.moe import numbering
from mindspeed_dsa.megatron.configuration import argument, check_trains, hybrid_flag
from mindspeed_dsa.megatron.expert_parallel import number_of_experts
from mindspeed_dsa.patches.spec import Patch


@dataclass(frozen=True)
class Options:
    """Options of the load report.

    Attributes:
        folder: folder for the records.
        padding: padding of sequences. Padding tokens are routed to experts but not counted.
    """

    folder: Path
    padding: Padding = field(default_factory=Padding)

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Build from resolved settings."""
        return cls(folder=Path(settings.moe_router_load_report), padding=Padding.of(settings))


def check_load_report(args: Any, options: Any) -> Sequence[str]:
    """Report a model without experts, the DSA warmup stage, and a folder that is a file."""
    flag = f"--moe-router-load-report {args.moe_router_load_report}"
    problems = [*check_trains(args, "--moe-router-load-report")]
    if not number_of_experts(args):
        problems.append(f"{flag}: this model has no experts to route to; set --num-experts or omit the flag")
    if hybrid := hybrid_flag(args):
        problems.append(
            f"{flag} numbers the layers of GPT models alone, not those of {hybrid}; omit one of them"
        )
    if argument(args, "dsa_stage") == "warmup":
        problems.append(
            f"{flag}: --dsa-stage warmup runs the routers without gradients, as an evaluation does, and such "
            "calls are not counted; report the stages after it"
        )
    if Path(args.moe_router_load_report).is_file():
        problems.append(f"{flag} is a file; name a folder")
    return problems


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
            f"{_HERE}.steps:count_tokens",
            "counts each expert's tokens in the router's map",
            params=("input",),
        ),
        *numbering.rows(f"{_HERE}.steps", "gives MoE layers their number in the whole model"),
        Patch(
            "megatron.training.training:training_log",
            "wrap",
            f"{_HERE}.steps:record_after_log",
            "writes the record of a step, where every rank comes once and TensorBoard's writer is at hand",
            params=("iteration",),
            required=False,
        ),
    ),
    options=Options.of,
    check=check_load_report,
    on_finalize=f"{_HERE}.steps:require_loop",
    doc="moe-router-load-report.md",
)
