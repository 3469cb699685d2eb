"""Counts of confusing words in docstrings, comments and pages, by file.

python -m tests.contract.words                     # the counts of the package and of the pages
python -m tests.contract.words --worst 30          # and the files and lines with the most
python -m tests.contract.words --lines PATH ...    # every place in some files
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.sources import nodes_of

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mindspeed_dsa"

WORDS = {
    "what": r"\bwhat\b",
    "that of": r"\b(that|those) of\b",
    "beside": r"\bbeside\b",
    "nobody": r"\b(nobody|whoever)\b",
    "lies": r"\blies\b",
}
"""Words that clear sentences do without, by the name of their budget."""
HEADLESS = re.compile(r"(of|that|by|in|as|what|whose|which|from|to|with|for|on|at|how|where|below)\b")
"""First words of an entry without a noun."""
VAGUE = {"each", "found", "own", "given", "known", "chosen", "at"}
"""Names of local variables that do not describe their value."""
LONG_SENTENCE = 35

_SECTION = re.compile(r"^( *)(Args|Attributes):$")
_ENTRY = re.compile(r"^( *)(\*{0,2}[A-Za-z_][\w, *]*): (.*)$")


@dataclass(frozen=True)
class Place:
    """A place: its kind, file, line from 1, and text."""

    kind: str
    file: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}: {self.kind}: {self.text.strip()[:110]}"


@dataclass
class Counts:
    """Sums over files, and every place that counts.

    Attributes:
        words: number of words in docstrings and comments, or in sentences of pages.
        entries: number of entries under Args and Attributes.
        sentences: number of sentences of pages.
        comments: number of lines that are a comment.
        lines: number of lines.
        places: all places, in the order of files.
    """

    words: int = 0
    entries: int = 0
    sentences: int = 0
    comments: int = 0
    lines: int = 0
    places: list[Place] = field(default_factory=list)

    def number(self, kind: str) -> int:
        return sum(place.kind == kind for place in self.places)

    def per_thousand(self, kind: str) -> float:
        return 1000 * self.number(kind) / max(self.words, 1)

    @property
    def headless(self) -> float:
        """Share of entries without a noun, in per cent."""
        return 100 * self.number("headless") / max(self.entries, 1)

    @property
    def commented(self) -> float:
        """Share of lines that are a comment, in per cent."""
        return 100 * self.comments / max(self.lines, 1)

    @property
    def long(self) -> float:
        """Share of sentences with more than :data:`LONG_SENTENCE` words, in per cent."""
        return 100 * self.number("long sentence") / max(self.sentences, 1)

    def worst(self, number: int) -> list[str]:
        """Return the files with the most places, the worst first, and their first places."""
        by_file = Counter(place.file for place in self.places)
        result = []
        for file, count in by_file.most_common(number):
            result.append(f"{file.relative_to(ROOT)}: {count}")
            result += [f"    {place}" for place in self.places if place.file == file][:5]
        return result


def python_files(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def pages() -> list[Path]:
    """Return the English pages."""
    folders = [
        ROOT / "docs",
        ROOT / "docs/design",
        ROOT / "docs/features",
        ROOT / "docs/hosts",
        ROOT / "docs/recipes",
    ]
    return sorted(path for folder in [ROOT, *folders] for path in folder.glob("*.md"))


def count_code(files: Iterable[Path]) -> Counts:
    """Count words in docstrings, attribute docs and comments."""
    counts = Counts()
    for file in files:
        source = file.read_text(encoding="utf-8")
        lines = source.splitlines()
        counts.lines += len(lines)
        for line, text in _comments(source):
            counts.comments += lines[line - 1].lstrip().startswith("#")
            _count_words(counts, file, line, text)
        nodes = nodes_of(file)
        for node in _documentation(nodes):
            for offset, text in enumerate(str(node.value).splitlines()):
                _count_words(counts, file, node.lineno + offset, text)
            _count_entries(counts, file, node)
        counts.places += [Place("vague local", file, *rest) for rest in _vague(nodes)]
    return counts


def count_pages(files: Iterable[Path]) -> Counts:
    """Count words in sentences of paragraphs and lists, not in tables, code and headings."""
    counts = Counts()
    for file in files:
        for line, paragraph in _paragraphs(file.read_text(encoding="utf-8")):
            _count_words(counts, file, line, paragraph)
            for sentence in re.split(r"(?<=[.!?])\s+", paragraph):
                counts.sentences += 1
                if len(sentence.split()) > LONG_SENTENCE:
                    counts.places.append(Place("long sentence", file, line, sentence))
    return counts


def _count_words(counts: Counts, file: Path, line: int, text: str) -> None:
    counts.words += len(re.findall(r"[A-Za-z][\w'-]*", text))
    plain = re.sub(r"``[^`]*``|`[^`]*`", "", text)
    for kind, pattern in WORDS.items():
        for _ in re.finditer(pattern, plain, re.I):
            counts.places.append(Place(kind, file, line, text))


def _count_entries(counts: Counts, file: Path, node: ast.Constant) -> None:
    section = None
    entries_at = None
    for offset, text in enumerate(str(node.value).splitlines()):
        heading = _SECTION.match(text)
        indent = len(text) - len(text.lstrip())
        if heading:
            section, entries_at = len(heading.group(1)), None
        elif section is not None and text.strip():
            if indent <= section:
                section = None
                continue
            entry = _ENTRY.match(text)
            entries_at = indent if entries_at is None else entries_at
            if entry and indent == entries_at:
                counts.entries += 1
                if HEADLESS.match(entry.group(3)):
                    counts.places.append(Place("headless", file, node.lineno + offset, text))


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"# ?(noqa|type:|fmt:|!)", token.string):
            yield token.start[0], token.string


def _documentation(nodes: Iterable[ast.AST]) -> Iterator[ast.Constant]:
    """Yield docstrings, and the strings below attributes that document them."""
    for node in nodes:
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value


def _vague(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield locals of :data:`VAGUE` that live longer than three lines."""
    functions, names = [], []
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append(node)
        elif isinstance(node, ast.Name) and node.id in VAGUE:
            names.append(node)
    for function in functions if names else ():
        spans: dict[str, list[int]] = {}
        begin = min(node.lineno for node in (function, *function.decorator_list))
        for name in names:
            if begin <= name.lineno <= (function.end_lineno or begin):
                spans.setdefault(name.id, []).append(name.lineno)
        for local, used in spans.items():
            if max(used) - min(used) >= 3:
                yield min(used), f"{local} in {function.name}"


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each paragraph and each entry of a list."""
    begin, lines, fenced = 0, [], False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        stripped = line.strip()
        if stripped.startswith("```"):
            fenced = not fenced
        ends = fenced or not stripped or re.match(r"```|#|\||<!--|!\[|\[\w+\]:", stripped)
        item = re.match(r"([*+-]|\d+\.) ", stripped)
        if (ends or item) and lines:
            yield begin, re.sub(r"<!--.*?-->|\]\([^)]*\)", "", " ".join(lines))
            lines = []
        if not ends:
            begin = begin if lines else number
            lines.append(stripped)


def table(counts: Counts) -> str:
    rows = [f"{kind} in 1,000 words: {counts.per_thousand(kind):.2f}" for kind in WORDS]
    if counts.entries:
        rows.append(f"entries without a noun: {counts.headless:.1f} % of {counts.entries}")
        rows.append(f"lines that are a comment: {counts.commented:.1f} % of {counts.lines}")
        rows.append(f"vague locals: {counts.number('vague local')}")
    if counts.sentences:
        rows.append(f"sentences over {LONG_SENTENCE} words: {counts.long:.1f} % of {counts.sentences}")
    return "\n".join([f"{counts.words} words", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worst", type=int, default=0, metavar="FILES")
    parser.add_argument("--lines", nargs="+", type=Path, default=[], metavar="PATH")
    options = parser.parse_args()
    if options.lines:
        paths = [path.resolve() for path in options.lines]
        code = python_files(*(path for path in paths if path.is_dir()))
        code += [path for path in paths if path.suffix == ".py"]
        text = [path for path in paths if path.suffix == ".md"]
        text += [page for page in pages() if any(folder in page.parents for folder in paths)]
    else:
        code, text = python_files(PACKAGE), pages()
    for name, counts in (("code", count_code(code)), ("pages", count_pages(text))):
        if counts.words:
            print(f"{name}: {table(counts)}", *counts.worst(options.worst), sep="\n")
            if options.lines:
                print(*counts.places, sep="\n")


if __name__ == "__main__":
    main()
