"""Pages in Chinese match the English ones: the same commands in the same order, flags, messages.

The generator writes the tables (`test_records.py` finds stale ones); the rest is written by hand.
"""

from __future__ import annotations

import json
import re
from itertools import zip_longest
from pathlib import Path

import pytest

from mindspeed_dsa.patches.errors import MindSpeedDSAError
from mindspeed_dsa.tools.compat.pages import Translation
from tests.contract.test_links import LINK
from tests.contract.test_user_pages import PAGES as USER_PAGES
from tests.contract.test_user_pages import listed_first

ROOT = Path(__file__).parents[2]
ENGLISH = {
    "README.md": "README.md",
    "features.md": "docs/features/README.md",
    "recipes.md": "docs/recipes/README.md",
    "torchtitan.md": "docs/hosts/torchtitan.md",
    **{page.name: f"docs/{page.name}" for page in USER_PAGES},
}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
GENERATED = re.compile(r"<!-- (\w+):begin -->\n.*?<!-- \1:end -->\n", re.S)
NAMES = re.compile(r"(?<![\w-])(?:--[a-z][\w-]*|[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+(?:=[\w:.-]+)?)", re.ASCII)
"""Flags and variables."""


def pair(name: str) -> tuple[str, str]:
    english = (ROOT / ENGLISH[name]).read_text(encoding="utf-8")
    if name == "features.md":  # the whole page is generated, below its introduction
        english = english[: english.index("\n## ")]
    chinese = (ROOT / "docs" / "zh" / name).read_text(encoding="utf-8")
    return GENERATED.sub("", english), GENERATED.sub("", chinese)


def commands(page: str) -> list[tuple[str, list[str]]]:
    """Return the blocks of code, without comments, as these are translated."""
    blocks = []
    for language, code in BLOCK.findall(page):
        lines = [re.sub(r"\s*(?<![\w$])# .*$", "", line).rstrip() for line in code.splitlines()]
        blocks.append((language, [line for line in lines if line]))
    return blocks


def names(page: str) -> list[frozenset[str]]:
    """Return the flags and variables of each section, outside of blocks of code."""
    return [
        frozenset(NAMES.findall(section)) for section in re.split(r"^## ", BLOCK.sub("", page), flags=re.M)
    ]


def first_cells(page: str) -> list[list[str]]:
    """Return the code in the first cell of each table row: messages, names, commands."""
    rows = re.findall(r"^\| ((?:`[^`]*`|[^|`])*) \|", BLOCK.sub("", page), flags=re.M)
    return [re.findall(r"`([^`]*)`", row) for row in rows]


def differences(english: str, chinese: str) -> list[str]:
    """Return the differences between two pages."""
    result = []
    blocks = zip_longest(commands(english), commands(chinese))
    result += [
        f"block {index}: {ours} and {theirs}" for index, (ours, theirs) in enumerate(blocks) if ours != theirs
    ]
    rows = zip_longest(first_cells(english), first_cells(chinese))
    result += [
        f"row {index}: {ours} and {theirs}" for index, (ours, theirs) in enumerate(rows) if ours != theirs
    ]
    sections = zip_longest(names(english), names(chinese), fillvalue=frozenset({"(no section)"}))
    for index, (ours, theirs) in enumerate(sections):
        if ours != theirs:
            result.append(f"section {index}: {sorted(ours - theirs)} and {sorted(theirs - ours)}")
    return result


@pytest.mark.parametrize("name", ENGLISH)
def test_both_languages_have_the_same_commands_and_flags(name):
    assert not differences(*pair(name))


def test_a_difference_is_named():
    english = "# A\n```\nmake train  # trains\nmake test\n```\n## B\n`--use-fused-dsa`, HCCL_X_Y=1\n"
    assert not differences(english, english.replace("trains", "训练").replace("# A", "# 甲"))
    assert differences(english, english.replace("make test", "make")) == [
        "block 0: ('', ['make train', 'make test']) and ('', ['make train', 'make'])"
    ]
    row = "| `no such file` or `no file` | a cause |\n"
    assert not differences(english + row, english + row.replace(" or ", "、"))
    assert differences(english + row, english + row.replace("such ", "")) == [
        "row 0: ['no such file', 'no file'] and ['no file', 'no file']"
    ]
    other = english.replace("--use-fused-dsa", "--use-fuse-dsa").replace("HCCL_X_Y=1", "`HCCL_X_Y=1`以及")
    assert differences(english, other) == ["section 1: ['--use-fused-dsa'] and ['--use-fuse-dsa']"]


@pytest.mark.parametrize("name", ENGLISH)
def test_each_page_links_to_the_other(name):
    english, chinese = ROOT / ENGLISH[name], ROOT / "docs" / "zh" / name
    for page, word, other in ((english, "中文", chinese), (chinese, "English", english)):
        found = re.search(rf"^\[{word}\]\((.*)\)$", page.read_text(encoding="utf-8"), flags=re.M)
        assert found, page
        assert (page.parent / found[1]).resolve() == other


def test_every_page_for_users_is_there_in_chinese():
    """There is no other page in Chinese, and the first one links to all of them."""
    folder = ROOT / "docs" / "zh"
    assert {page.name for page in folder.glob("*.md")} == set(ENGLISH)
    assert {f"docs/{name}" for name in listed_first()} <= set(ENGLISH.values())
    linked = {name for name, _ in LINK.findall((folder / "README.md").read_text(encoding="utf-8"))}
    assert linked >= set(ENGLISH) - {"README.md"}


@pytest.mark.parametrize("name", ENGLISH)
def test_links_stay_in_chinese(name):
    """Links lead to pages in Chinese wherever these exist."""
    page = ROOT / "docs" / "zh" / name
    english = {(ROOT / there).resolve() for there in ENGLISH.values()} - {(ROOT / ENGLISH[name]).resolve()}
    linked = {
        (page.parent / target).resolve() for target, _ in LINK.findall(page.read_text(encoding="utf-8"))
    }
    assert not linked & english


def test_what_is_not_translated_or_needs_no_translation_is_named(tmp_path):
    (tmp_path / "words.json").write_text(json.dumps({"a key": "键", "gone": "没有了"}))
    words = Translation(tmp_path / "words.json")
    assert [words(text) for text in ("a key", "a query", "2, 4", "`--flag`")] == [
        "键",
        "a query",
        "2, 4",
        "`--flag`",
    ]
    assert words.problems() == [
        f"  - translate in docs/{tmp_path.name}/words.json: 'a query'",
        f"  - nothing says any more, in docs/{tmp_path.name}/words.json: 'gone'",
    ]


def test_a_file_that_is_no_json_is_named(tmp_path):
    with pytest.raises(MindSpeedDSAError, match=r"words\.json"):
        Translation(tmp_path / "words.json")
