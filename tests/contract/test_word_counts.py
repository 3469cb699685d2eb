"""Budgets of the counts in ``tests/contract/words.py``, each a little above the value when it was set."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.contract import words
from tests.contract.words import Counts, count_code, count_pages, pages, python_files

CODE = {"what": 0.10, "that of": 0.05, "beside": 0.05, "nobody": 0.05, "lies": 0.05}
PAGES = {"what": 0.20, "that of": 0.10, "beside": 0.10, "nobody": 0.05, "lies": 0.05}
"""Largest number in 1,000 words."""
HEADLESS, LONG, COMMENTED = 0.1, 0.5, 2.3
"""Per cent: entries without a noun and long sentences at most, lines that are a comment at least."""
VAGUE = 70
WORST = 10
"""Number of files that a failure names."""


def over(counts: Counts, budgets: dict[str, float]) -> list[str]:
    return [
        f"{kind!r} {counts.per_thousand(kind):.2f} times in 1,000 words, and {most} are allowed"
        for kind, most in budgets.items()
        if counts.per_thousand(kind) > most
    ]


def listed(problems: list[str], counts: Counts) -> str:
    return "\n".join(["", *problems, "worst first:", *counts.worst(WORST)])


def test_docstrings_and_comments():
    counts = count_code(python_files(words.PACKAGE))
    problems = over(counts, CODE)
    if counts.headless > HEADLESS:
        problems.append(f"{counts.headless:.1f} % of the entries begin without a noun")
    if counts.number("vague local") > VAGUE:
        problems.append(f"{counts.number('vague local')} locals do not say what they hold")
    if counts.commented < COMMENTED:
        problems.append(
            f"{counts.commented:.1f} % of the lines are comments: reasons belong next to their lines"
        )
    assert not problems, listed(problems, counts)


def test_pages():
    counts = count_pages(pages())
    problems = over(counts, PAGES)
    if counts.long > LONG:
        problems.append(f"{counts.long:.1f} % of the sentences have more than {words.LONG_SENTENCE} words")
    assert not problems, listed(problems, counts)


CODE_WITH_FAULTS = '''
def gather(rows, names):
    """Gather what the layer needs; those of others lie beside it.

    Args:
        rows: of the microbatch.
        names: tensor names, one for
            of each part.
    """
    found = [name for name in names]  # what is read: ``what``
    names = list(names)

    # Whoever calls this holds the lock, which lies in memory.
    return found
'''
PAGE_WITH_FAULTS = """# What it does

Give `what` to the layer. It takes what it needs.

```
what
```

| what | beside |

- A list entry beside the others {long}.
"""


@pytest.mark.parametrize("kind", ["what", "that of", "beside", "nobody", "lies", "headless", "vague local"])
def test_each_fault_in_code_is_counted(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "gather.py"
    file.write_text(textwrap.dedent(CODE_WITH_FAULTS), encoding="utf-8")
    expected = {"what": 2}.get(kind, 1)
    counts = count_code([file])
    assert counts.number(kind) == expected
    assert counts.entries == 2
    assert counts.comments == 1, "comments that have a line of their own"


def test_each_fault_in_a_page_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(PAGE_WITH_FAULTS.format(long="word " * 40), encoding="utf-8")
    counts = count_pages([file])
    assert {kind: counts.number(kind) for kind in words.WORDS} == {
        "what": 1,
        "that of": 0,
        "beside": 1,
        "nobody": 0,
        "lies": 0,
    }
    assert counts.number("long sentence") == 1
    assert counts.sentences == 3
