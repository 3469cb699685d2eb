"""Pages for users are few and short, and the index lists them first."""

from __future__ import annotations

import re

import pytest
from packaging.specifiers import SpecifierSet

from mindspeed_dsa.patches import versions
from mindspeed_dsa.session.records import RELEASES
from tests.contract.test_pages import ROOT

INDEXED = ("README.md", "architecture.md")
PAGES = sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in INDEXED)
MOST_PAGES, MOST_LINES = 14, 150


def listed_first() -> list[str]:
    """Return the pages of the index's first section, by their path in ``docs/``."""
    listed = re.split(r"^## ", (ROOT / "docs" / "README.md").read_text(encoding="utf-8"), flags=re.M)[1]
    return re.findall(r"^\| \[[^]]+\]\(([^)]+)\)", listed, flags=re.M)


def test_there_are_few_pages_for_users() -> None:
    names = listed_first()
    assert {name for name in names if "/" not in name} == {page.name for page in PAGES}
    assert len(names) <= MOST_PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_for_users_is_short(page) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_support_says_what_the_code_asks_for() -> None:
    text = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    triton = (ROOT / "mindspeed_dsa" / "ops" / "triton" / "common.py").read_text(encoding="utf-8")
    least = re.search(r'_OLDEST_ON_GPU = .*Version\("([\d.]+)"\)', triton)[1]
    fast = re.search(r'_TAKES_BRANCHES = Version\("([\d.]+)"\)', triton)[1]
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert f"Triton {least} (torch" in text
    assert f"Triton {fast} (torch" in text
    assert f'"triton>={least};' in setup
    python = re.search(r'python_requires=">=([\d.]+),<3\.(\d+)"', setup)
    assert f"| Python | {python[1]} to 3.{int(python[2]) - 1} |" in text
    torch = SpecifierSet(versions.TORCH_TRIED)
    first, last = re.search(r"\| torch \| ([\d.]+) to ([\d.]+) \|", text).groups()
    assert first in torch
    assert last in torch
    major, minor = last.split(".")
    assert f"{major}.{int(minor) + 1}" not in torch
    megatron = re.search(r"\| Megatron-core \| ([\d.]+) to ([\d.]+),", text).groups()
    assert megatron == (RELEASES[0], RELEASES[-1])
