"""Figures on the pages equal the committed results."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks import figures


@pytest.mark.parametrize("name", figures.TABLES)
def test_a_page_has_the_figures_of_the_results(name: str) -> None:
    text = (figures.ROOT / name).read_text(encoding="utf-8")
    assert figures.filled(text, figures.TABLES[name]()) == text, "run make docs"


def test_figures_come_from_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = json.loads(json.dumps(figures.metrics("gpu-h100")))
    changed["layer"][figures.GLM]["fused"]["step_ms"] = 12.34
    changed["layer"][figures.GLM]["stock"] = "OutOfMemoryError: CUDA out of memory"
    other = figures.metrics
    monkeypatch.setattr(figures, "metrics", lambda name: changed if name == "gpu-h100" else other(name))
    row = figures.TABLES["README.md"]().splitlines()[2]
    assert "| does not fit | **12.3 ms, 8.8 GiB** |" in row


def test_a_page_without_marks_is_named() -> None:
    with pytest.raises(ValueError, match="lacks <!-- figures:begin -->"):
        figures.filled("no table", "| a |\n")


def test_sentences_have_the_figures_of_the_results() -> None:
    found = [page for page in figures.pages() if figures.FIGURE.search(page.read_text(encoding="utf-8"))]
    assert len(found) > 10
    for page in found:
        text = page.read_text(encoding="utf-8")
        assert figures.placed(text) == text, f"{page.relative_to(figures.ROOT)}: run make docs"
        assert text.count("<!-- figure ") == len(figures.FIGURE.findall(text)), page


def test_a_figure_of_a_sentence_comes_from_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "metrics", lambda name: {"step, in all": {"ms": 1234.5}, "apart": 5.4e-05})
    text = (
        "<!-- figure some/step, in all/ms .1f*0.001 -->9<!-- end --> s, "
        "<!-- figure some/apart .1e --><!-- end -->"
    )
    assert figures.placed(text) == (
        "<!-- figure some/step, in all/ms .1f*0.001 -->1.2<!-- end --> s, "
        "<!-- figure some/apart .1e -->5.4e-5<!-- end -->"
    )
    with pytest.raises(KeyError):
        figures.placed("<!-- figure some/nothing .1f -->9<!-- end -->")


MEASURED = re.compile(
    r"\d(?:[\d.,]*\d)?\s?(?:ms|µs|us|ns|microseconds?|milliseconds?|[GM]i?B/s|TFLOP/s|tokens/s|%|percent)(?![\w/])"
    r"|\d\.\d+ (?:s\b|times(?! as large))|\d times as (?:fast|long)"
    r"|\d of (?:the|its|stock's) (?:processor )?time\b"
)
FILLED = re.compile(r"<!-- ([\w-]+):begin -->.*?<!-- \1:end -->|<!-- figure .*?<!-- end -->|```.*?```", re.S)
DEFINED = {
    "ascend-coc.md": ("3 %",),  # a rule of the choice
    "balanced-moe-experts.md": ("3 percent",),
    "benchmarks.md": ("1.1 times", "1 %"),  # the sizes of a measurement, and a bar
    "dense-context-parallel.md": ("400 TFLOP/s", "50 GB/s"),  # an example's rates
    "fsdp2.md": ("400 TFLOP/s", "50 GB/s"),
    "fused-dsa.md": ("99.5 %",),  # other people's
    "moe-batch-overlap.md": ("3 %",),
    "options.md": ("0.1 %", "2 %"),  # bounds of tests/combinations
    "pairs.md": ("0.1 %", "2 %", "5 %"),  # bounds of tests/combinations
    "swap-attention.md": ("1.1 times", "5 %", "2 %"),  # rules, and the bound of a test
    "swap-optimizer.md": ("29 %",),  # the model's
}
"""Figures in text that are not measurements."""


DIARIES = ("gpu.md", "gpu-kernels.md", "articles.md")
"""Pages with dated attempts on kernels, and with other projects' figures."""


@pytest.mark.parametrize("folder", ["", "docs/features", "docs/hosts", "docs/design"])
def test_no_measured_figure_is_typed(folder: str) -> None:
    pages = sorted((figures.ROOT / folder).glob("*.md" if folder else "README.md"))
    typed = [
        f"{page.name}: {figure}"
        for page in pages
        if page.name not in DIARIES
        for figure in MEASURED.findall(FILLED.sub("", page.read_text(encoding="utf-8")))
        if figure not in DEFINED.get(page.name, ())
    ]
    assert pages
    assert not typed, "put the figure's place in benchmarks/results there, or leave the figure out"


@pytest.mark.parametrize(
    "text",
    ["takes 12.9 ms", "1.5 times as fast", "2 times as long", "0.9 of the time", "7.5 GB/s", "3 % of a step"],
)
def test_a_typed_figure_is_found(text: str) -> None:
    assert MEASURED.search(text)
    assert not MEASURED.search("twice as fast, 4 ranks, 128 x 128, 0.16 to 0.19, 2.0 times as large")
