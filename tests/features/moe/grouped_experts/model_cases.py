"""Worker functions: models with grouped and with sequential experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

from tests.support import model, optimizer_job

SWITCHES = {"moe_grouped_gemm": True}
GROUPED = {"moe_grouped_gemm": True}


def losses(grouped: bool, steps: int = 10, build: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return loss and gradient norm per step, from Megatron's own initial weights."""
    options = dict(build or {})
    options["switches"] = {**SWITCHES, **options.pop("switches", {})}
    options["overrides"] = {**(GROUPED if grouped else {}), **options.pop("overrides", {})}
    with mock.patch.object(model, "fill_by_name"):
        job = optimizer_job.build(**options)
    kinds = {type(module.experts).__name__ for module in job.model.modules() if hasattr(module, "experts")}
    assert kinds == {"GroupedExperts" if grouped else "SequentialMLP"}
    marks = [p.grad_added_to_main_grad for p in job.model.parameters() if p.dim() == 3]
    records = [optimizer_job.step(job, number) for number in range(steps)]
    assert not any(marks)
    stacks = [p for p in job.model.parameters() if p.dim() == 3]
    assert all(p.grad_added_to_main_grad for p in stacks)
    assert len(stacks) == (2 if grouped else 0)
    return records
