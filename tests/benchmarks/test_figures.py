"""Figures of pages are those of the committed results."""

from __future__ import annotations

import json

import pytest

from benchmarks import figures


@pytest.mark.parametrize("name", figures.TABLES)
def test_a_page_has_the_figures_of_the_results(name: str) -> None:
    text = (figures.ROOT / name).read_text(encoding="utf-8")
    assert figures.filled(text, figures.TABLES[name]()) == text, "run make docs"


def test_figures_come_from_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(json.dumps(figures.metrics("gpu-h100")))
    found["layer"][figures.GLM]["fused"]["step_ms"] = 12.34
    found["layer"][figures.GLM]["stock"] = "OutOfMemoryError: CUDA out of memory"
    other = figures.metrics
    monkeypatch.setattr(figures, "metrics", lambda name: found if name == "gpu-h100" else other(name))
    row = figures.TABLES["README.md"]().splitlines()[2]
    assert "| does not fit | **12.3 ms, 8.8 GiB** |" in row


def test_a_page_without_marks_is_named() -> None:
    with pytest.raises(ValueError, match="lacks <!-- figures:begin -->"):
        figures.filled("no table", "| a |\n")
