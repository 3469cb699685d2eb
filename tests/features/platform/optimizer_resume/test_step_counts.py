"""The distributed optimizer on torch's Adam goes on as if it had never stopped."""

from __future__ import annotations

import pytest
import torch

from tests.support import third_party

third_party.or_skip("megatron.core")

CASES = "tests.features.platform.optimizer_resume.resume_cases"


@pytest.mark.parametrize("layout", ["dp_zero", "dp_reshardable"])
def test_a_resumed_run_equals_an_unbroken_one(pool, layout):
    ranks = pool.run(f"{CASES}:train_and_resume", 2, layout=layout)
    for found in ranks:
        assert {step.item() for step in found["steps"]} == {4.0}
        assert any(not torch.equal(weight, torch.zeros_like(weight)) for weight in found["unbroken"])
        assert all(map(torch.equal, found["unbroken"], found["resumed"]))
