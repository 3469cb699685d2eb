"""What the report cannot be written for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_dsa.megatron.configuration import argument


def check_load_report(args: Any) -> Sequence[str]:
    """Report models that route nothing and folders that are files."""
    flag = f"--moe-router-load-report {args.moe_router_load_report}"
    problems = []
    if not (argument(args, "num_experts") or argument(args, "num_moe_experts")):
        problems.append(f"{flag}: this model has no experts to route to; set --num-experts or omit the flag")
    if argument(args, "dsa_stage") == "warmup":
        problems.append(
            f"{flag}: --dsa-stage warmup runs the routers without gradients, as an evaluation does, and such "
            "calls are not counted; report the stages after it"
        )
    if Path(args.moe_router_load_report).is_file():
        problems.append(f"{flag} is a file; name a folder")
    return problems
