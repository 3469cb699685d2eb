"""The articles' figures from the planner's functions, and their page."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_dsa.tools.planner import articles
from mindspeed_dsa.tools.planner.articles import FIGURES

PAGE = Path(__file__).parents[3] / "docs" / "articles.md"
DO_NOT_FOLLOW = {
    "other weights and gradients a rank, PP2 TP4, as printed": 17.0,
    "L1: gradient of ReLU": 256.0,
}


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: f"{figure.article}: {figure.name}")
def test_figures_follow_from_their_inputs(figure):
    if figure.name in DO_NOT_FOLLOW:
        assert figure.compute() == DO_NOT_FOLLOW[figure.name]
        assert not figure.reproduced
    else:
        assert figure.compute() == pytest.approx(figure.stated, rel=figure.tolerance)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: f"{figure.article}: {figure.name}")
def test_what_is_called_derived_hangs_on_the_planner(figure, monkeypatch):
    """Arithmetic on numbers that an article prints itself says nothing of this library, and is called so."""

    def asked(*args, **kwargs):
        raise LookupError

    monkeypatch.setattr(articles, "deepseek", asked)
    monkeypatch.setattr(articles.in_flight, "warmups", asked)
    if figure.own:
        figure.compute()
        assert figure.verdict != "derived"
    else:
        with pytest.raises(LookupError):
            figure.compute()


def test_the_page_has_them_all():
    assert articles.table() in PAGE.read_text(encoding="utf-8"), (
        "run python -c 'from mindspeed_dsa.tools.planner import articles; print(articles.table())' and put "
        "the tables into docs/articles.md"
    )
