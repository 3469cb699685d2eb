"""The version is stated once, and its section of the changelog has a date and kinds of changes."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[2]
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Known limits"}
"""Kinds of Keep a Changelog, and one more."""


def sections() -> list[tuple[str, str]]:
    """Return title and text of the changelog's sections, the newest first."""
    parts = re.split(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def test_the_newest_release_is_the_packages_version():
    (declared,) = re.findall(r'^    version="(.*)",$', (ROOT / "setup.py").read_text(), flags=re.M)
    (first, _), *releases = sections()
    assert first == "Unreleased"
    released = [title.split(" - ") for title, _ in releases]
    assert released[0][0] == declared
    versions = [Version(version) for version, _ in released]
    assert versions == sorted(versions, reverse=True)
    assert all(datetime.date.fromisoformat(date) for _, date in released)


def test_releases_say_what_kind_of_change_each_is():
    for title, text in sections()[1:]:
        kinds = re.findall(r"^### (.*)$", text, flags=re.M)
        assert kinds, title
        assert set(kinds) <= KINDS, title
        assert len(kinds) == len(set(kinds)), title


def test_the_version_stands_nowhere_else():
    (declared,) = re.findall(r'^    version="(.*)",$', (ROOT / "setup.py").read_text(), flags=re.M)
    named = re.compile(rf"__version__ = |(?i:version)\s*[=:]\s*['\"]{re.escape(declared)}['\"]")
    files = [*(ROOT / "mindspeed_dsa").rglob("*.py"), ROOT / "pyproject.toml", ROOT / "mkdocs.yml"]
    assert not [path for path in files if named.search(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(("page", "word"), [("quickstart.md", "Extras: "), ("zh/quickstart.md", "extras 有")])
def test_the_first_page_lists_the_extras_that_there_are(page, word):
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    declared = re.findall(r'^(?:    "(\w+)": \[|EXTRAS\["(\w+)"\] = )', setup, flags=re.M)
    _, _, listed = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(word)
    names = re.findall(r"`(\w+)`", re.split(r"\.|。", listed, maxsplit=1)[0])
    assert sorted(names) == sorted("".join(each) for each in declared)
