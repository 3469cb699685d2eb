"""The articles' figures from the planner's functions, and their page."""

from __future__ import annotations

import pytest

from mindspeed_dsa.tools.planner import schedules
from tests.tools.planner import articles
from tests.tools.planner.articles import FIGURES

DO_NOT_FOLLOW = {"L1: gradient of ReLU": 256.0}
of_each = pytest.mark.parametrize(
    "figure", FIGURES, ids=[f"{figure.article}: {figure.name}" for figure in FIGURES]
)


@of_each
def test_figures_follow_from_their_inputs(figure):
    if figure.name in DO_NOT_FOLLOW:
        assert figure.compute() == DO_NOT_FOLLOW[figure.name]
        assert not figure.reproduced
    else:
        assert figure.compute() == pytest.approx(figure.stated, rel=figure.tolerance)


@of_each
def test_figures_hang_on_the_planner(figure, monkeypatch):
    def asked(*args, **kwargs):
        raise LookupError

    monkeypatch.setattr(articles, "deepseek", asked)
    monkeypatch.setattr(schedules, "warmups", asked)
    with pytest.raises(LookupError):
        figure.compute()


def test_the_page_has_them_all():
    assert articles.table() in articles.PAGE.read_text(encoding="utf-8"), (
        "run python -m tests.tools.planner.articles, which writes docs/design/articles.md"
    )
