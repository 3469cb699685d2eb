"""Norm weights in fp32 on the installed release: optimizer updates, and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.features.operators.norm_weights import fp32_norms
from tests.features.operators.norm_weights.fp32_norms import FLAG
from tests.matrix import model as tiny
from tests.matrix.record import Note, at_work
from tests.support import model as job
from tests.support import optimizer_job

pytestmark = pytest.mark.releases(">=0.12.1")


@pytest.mark.parametrize("options", [{}, {"distributed": True}], ids=["plain", "distributed"])
def test_weights_of_norms_are_updated_as_megatrons_masters(
    pool: Any, note: Note, options: Mapping[str, Any]
) -> None:
    note.begins("one process", "init-norm-weight-in-fp32")
    arguments = {"drawn": True, "clip": 0.0, **options}
    (stock,) = pool.run(f"{__name__}:from_equal_weights", 1, switches={}, **arguments)
    (ours,) = pool.run(f"{__name__}:from_equal_weights", 1, switches=FLAG, **arguments)
    for name, weight in ours["weights"].items():
        assert weight.dtype == torch.float32
        assert weight.flatten().equal(stock["masters"][name].flatten()), name
    note.trained([ours])


def test_weights_of_norms_in_checkpoints(pool: Any, note: Note, tmp_path: Path) -> None:
    """Saved in fp32, loaded and saved again by a job with all weights in 16 bits, and resumed."""
    note.begins("DP2, distributed optimizer", "init-norm-weight-in-fp32")
    steps, options = "tests.matrix.test_memory:optimizer_steps", {"distributed": True}
    whole = pool.run(steps, 2, steps=4, switches=FLAG, **options)
    folders = [str(tmp_path / name) for name in ("one", "other")]
    for folder in folders:
        Path(folder).mkdir()
    one, other = folders
    pool.run(steps, 2, steps=2, folders={"save": one}, switches=FLAG, **options)
    pool.run(steps, 2, steps=0, folders={"load": one, "save": other}, switches={}, **options)
    resumed = pool.run(steps, 2, steps=2, first=2, folders={"load": other}, switches=FLAG, **options)
    for expected, result in zip(whole, resumed, strict=True):
        for what in ("weights", "masters", "moments"):
            assert result[what] == expected[what], what
        assert result["records"] == expected["records"][2:]
    note.trained(resumed)


def from_equal_weights(**arguments: Any) -> dict[str, Any]:
    """Run :func:`fp32_norms.from_equal_weights` with the model of any release."""
    with (
        mock.patch.object(optimizer_job, "config", tiny.config_with_experts),
        mock.patch.object(job, "gpt_model", tiny.gpt_model),
    ):
        return {**fp32_norms.from_equal_weights(**arguments), "at work": at_work()}
