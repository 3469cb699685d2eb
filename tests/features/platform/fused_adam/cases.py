"""What runs inside the pool's workers: a few steps of Megatron's optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch

from tests.support.optimizer_job import build, drawn_gradients, gather, step


def train(switches: Mapping[str, Any] | None, loads: bool, **options: Any) -> dict[str, Any]:
    """Three steps with given gradients, between two of which the state may be saved and loaded.

    Returns:
        Weights, calls of the fused operator, and what groups say of it between steps.
    """
    job = build(switches, **options)
    # Models of every precision; the operator has a function for each form of weight decay.
    with mock.patch.object(torch, "_fused_adamw_", wraps=torch._fused_adamw_) as fused:
        for number in range(3):
            if number == 2 and loads:
                job.optimizer.load_state_dict(job.optimizer.state_dict())
            step(job, number, gradients=drawn_gradients)
    gather(job)
    groups = [group for part in job.parts for group in part.optimizer.param_groups]
    steps = [
        float(entry["step"])
        for part in job.parts
        for entry in part.optimizer.state.values()
        if "step" in entry
    ]
    return {
        "weights": {name: parameter.detach().clone() for name, parameter in job.model.named_parameters()},
        "fused": fused.call_count,
        "said": [(group.get("fused"), group.get("foreach")) for group in groups],
        "steps": steps,
    }
