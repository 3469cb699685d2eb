"""Pages for users are few and short; the index lists each of them first."""

from __future__ import annotations

import re

import pytest

from tests.contract.test_pages import ROOT

INDEXED = ("README.md", "architecture.md")
PAGES = sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in INDEXED)
MOST_PAGES, MOST_LINES = 14, 150


def test_there_are_few_pages_for_users() -> None:
    listed = re.split(r"^## ", (ROOT / "docs" / "README.md").read_text(encoding="utf-8"), flags=re.M)[1]
    names = re.findall(r"^\| \[[^]]+\]\(([^)]+)\)", listed, flags=re.M)
    assert {name for name in names if "/" not in name} == {page.name for page in PAGES}
    assert len(names) <= MOST_PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_for_users_is_short(page) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
