"""What does not go together with router-load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def check_router_load(args: Any) -> Sequence[str]:
    """Problems with a job's arguments; those that the job does not know are not judged."""
    problems = []
    if getattr(args, "num_experts", 1) is None:
        problems.append(
            "--log-router-load: a model without experts has no router; add --num-experts or omit it"
        )
    if args.router_load_interval < 1:
        problems.append(f"--router-load-interval {args.router_load_interval}: use at least 1")
    return problems
