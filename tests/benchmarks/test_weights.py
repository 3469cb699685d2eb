"""The benchmark of weights, on a tiny model, reports every metric."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import third_party

third_party.or_skip("megatron.core")


@pytest.mark.full
def test_every_metric_is_measured() -> None:
    from benchmarks import weights

    figures = weights.run("cpu", quick=True)
    json.dumps(figures)
    for metric in ("import_rate_over_copy", "export_rate_over_copy", "resident_over_largest_tensor"):
        assert all(figures[metric][kind] > 0 for kind in ("bf16", "fp8"))


def test_files_that_come_back_otherwise_are_refused(tmp_path: Path) -> None:
    from benchmarks import weights

    for name, content in (("model", b"1"), ("out", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
    weights._require_same(tmp_path / "model", tmp_path / "model")
    with pytest.raises(RuntimeError, match=r"model.safetensors is another"):
        weights._require_same(tmp_path / "model", tmp_path / "out")
