"""Words of generated tables in another language: a file with the texts of declarations, and theirs.

A text is found by itself, not by a name: a declaration that is worded anew has no translation until somebody
has read both, and a translation that nothing asks for any more is named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from mindspeed_dsa.patches.errors import MindSpeedDSAError

Word = Callable[[str], str]
_PLAIN = re.compile(r"[\W\d_]*|`[^`]*`")
"""What is the same in every language: numbers, and what stands as code."""


class Translation:
    """The translations of one file.

    Args:
        file: a JSON object, from texts to theirs.

    Raises:
        MindSpeedDSAError: it cannot be read.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            self._said: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise MindSpeedDSAError(f"mindspeed_dsa: {file} cannot be read: {error}") from None
        self._asked: dict[str, None] = {}

    def __call__(self, text: str) -> str:
        """Return a text's translation; itself where there is none, which :meth:`problems` names."""
        if _PLAIN.fullmatch(text):
            return text
        self._asked[text] = None
        return self._said.get(text, text)

    def table(self, markdown: str) -> str:
        """Translate the cells of a table that is written by hand."""
        lines = [line.strip("|\n").split("|") for line in markdown.splitlines(keepends=True)]
        return "".join("|" + "|".join(map(self._cell, cells)) + "|\n" for cells in lines)

    def _cell(self, cell: str) -> str:
        text = cell.strip()
        return cell.replace(text, self(text)) if text else cell

    def problems(self) -> list[str]:
        """Return what is not translated, and what is and need not be, as `make docs` prints it."""
        where = f"docs/{self._file.parent.name}/{self._file.name}"
        lacking = [f"  - translate in {where}: {text!r}" for text in self._asked if text not in self._said]
        unused = [
            f"  - nothing says any more, in {where}: {text!r}" for text in self._said.keys() - self._asked
        ]
        return lacking + sorted(unused)


def between(page: str, section: str) -> str:
    """Return what stands between a section's markers on a page; nothing where it has none."""
    found = re.search(rf"<!-- {section}:begin -->\n(.*?)<!-- {section}:end -->", page, flags=re.S)
    return found[1] if found else ""
