"""Files and folders of this repository that the pages name are there; links are in ``test_links.py``."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mindspeed_dsa"
PAGES = sorted(
    path
    for path in (
        *ROOT.glob("*.md"),
        *(path for folder in ("docs", "examples", "mindspeed_dsa") for path in (ROOT / folder).rglob("*.md")),
    )
    if path.name != "CHANGELOG.md"  # what it names was there then
)
TOP = ("mindspeed_dsa", "tests", "docs", "benchmarks")
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if path.is_dir() and not path.name.startswith("_"))
NAMED = re.compile(
    rf"(?<![\w/.-])(?:(?:{'|'.join(TOP)})/[\w./*{{}},-]*[\w}}/*]|(?:{'|'.join(ROOMS)})/[\w./*{{}},-]*\.py)(?![\w-])"
)
"""Paths from the root of the checkout, and files of the package from its own folder."""
OTHERS = {"tools/preprocess_data.py"}
"""Files of Megatron-LM whose folder has the name of a room."""


def expanded(path: str) -> list[str]:
    """Return ``a/{b,c}.py`` as ``a/b.py`` and ``a/c.py``."""
    parts = [part.split(",") for part in re.split(r"[{}]", path)]
    parts = [[",".join(part)] if index % 2 == 0 else part for index, part in enumerate(parts)]
    return ["".join(chosen) for chosen in product(*parts)]


def missing(text: str, beside: Path = ROOT) -> list[str]:
    """Return the paths that a page names and that exist neither here nor in the page's own folder."""
    paths = {path for named in NAMED.findall(text) if named not in OTHERS for path in expanded(named)}
    return sorted(
        path for path in paths if not any(any(folder.glob(path)) for folder in (ROOT, PACKAGE, beside))
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_that_a_page_names_exist(page):
    assert not missing(page.read_text(encoding="utf-8"), page.parent)


def test_a_path_that_is_gone_is_named():
    text = "`tests/no.py`, ops/backend.py and `mindspeed_dsa/patches/{site,lost}.py`, see session/gone.py."
    assert missing(text) == ["mindspeed_dsa/patches/lost.py", "session/gone.py", "tests/no.py"]
