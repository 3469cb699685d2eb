"""A transformers model trains on NPU tensors as on CPU tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.npu import transformers_steps
from tests.npu.device import launch


def steps(device: str) -> dict[str, list[float]]:
    """Return the script's figures."""
    script = Path(transformers_steps.__file__)
    # transformers imports torch_npu for CPU tensors, too, and its optimizers then query a device.
    (output,) = launch.run(script, [device]).require_success().output
    (line,) = (text for text in output.splitlines() if text.startswith(transformers_steps.MARK))
    figures: dict[str, list[float]] = json.loads(line.removeprefix(transformers_steps.MARK))
    return figures


def test_losses_and_norms_are_those_of_a_cpu() -> None:
    pytest.importorskip("transformers")
    got, expected = steps("npu"), steps("cpu")
    assert {"lightning_indexer npu", "sparse_flash_attention chunked"} <= set(got["calls"])
    assert got["losses"] == pytest.approx(expected["losses"], rel=2e-3)
    assert got["norms"] == pytest.approx(expected["norms"], rel=2e-2)
