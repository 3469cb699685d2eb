"""Relative links in the documentation lead to existing pages and headings."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for folder in ("", "docs/**/", "examples/**/", "mindspeed_dsa/**/")
    for page in sorted(ROOT.glob(f"{folder}*.md"))
]
LINK = re.compile(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)")


@cache
def headings(page: Path) -> frozenset[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.M)
    return frozenset(re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles)


def broken(page: Path) -> list[str]:
    """Return the broken links of a page."""
    wrong = []
    for path, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        target = page.parent / path if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in headings(target)):
            wrong.append(f"{path}#{anchor}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page):
    assert not broken(page)


def test_a_link_that_leads_nowhere_is_named(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A `title`, two\n[a](#a-title-two) [b](gone.md) [c](page.md#no-title) [d](https://e.f/#g)\n"
    )
    assert broken(page) == ["gone.md#", "page.md#no-title"]
