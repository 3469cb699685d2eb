"""A shell script as commands of words: quotes, comments, continuations, here-documents and arrays."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_NAME = re.compile(r"[A-Za-z_]\w*")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_BREAKS = "\n;&|()"


class ShellError(Exception):
    """The text is no shell script that can be read; says where."""


@dataclass(frozen=True)
class Part:
    """A piece of a word.

    Attributes:
        text: literal text; of a variable its name; of anything else that a shell computes, what is written.
        kind: ``text``, ``variable``, ``array`` (all elements of one), ``arithmetic`` or ``computed``.
        quoted: whether it stands in quotes.
        raw: as it is written.
        default: of ``${NAME:-default}``.
    """

    text: str
    kind: str = "text"
    quoted: bool = False
    raw: str = ""
    default: str | None = None


Word = tuple[Part, ...]


@dataclass
class Command:
    """One simple command.

    Attributes:
        words: of the command line; redirections are left out.
        arrays: elements of ``NAME=(...)``, by the place of the word ``NAME=``.
        start, end: where it lies in the script, redirections and what follows a pipe left out.
        line: in which it begins.
    """

    start: int
    line: int
    words: list[Word] = field(default_factory=list)
    arrays: dict[int, list[Word]] = field(default_factory=dict)
    end: int = 0


def commands(text: str) -> Iterator[Command]:
    """Every simple command, in the order of the script.

    Raises:
        ShellError: a quote, bracket or here-document is never closed.
    """
    return _Reader(text).commands()


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.at = text.removesuffix("\\"), 0  # nothing continues behind the last line
        self._awaited: list[str] = []

    def _line(self, at: int) -> int:
        return self.text.count("\n", 0, at) + 1

    def _fail(self, at: int, what: str) -> ShellError:
        return ShellError(f"line {self._line(at)}: {what} is never closed")

    def commands(self) -> Iterator[Command]:
        while True:
            self._skip_blanks()
            if self.at >= len(self.text):
                if self._awaited:
                    raise self._fail(self.at, f"the here-document {self._awaited[0]}")
                return
            if self.text[self.at] in _BREAKS:
                self._break()
                continue
            command = self._command()
            if command.words:
                yield command

    def _skip_blanks(self) -> None:
        while self.at < len(self.text):
            if self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self.text[self.at] in " \t\r":
                self.at += 1
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def _break(self) -> None:
        newline = self.text[self.at] == "\n"
        self.at += 1
        while newline and self._awaited:
            word = self._awaited.pop(0)
            end = re.compile(rf"^\t*{re.escape(word)}$", re.MULTILINE).search(self.text, self.at)
            if end is None:
                raise self._fail(self.at - 1, f"the here-document {word}")
            self.at = end.end()

    def _command(self) -> Command:
        command = Command(self.at, self._line(self.at))
        redirected = False
        while self.at < len(self.text):
            self._skip_blanks()
            if self.at >= len(self.text) or self.text[self.at] in _BREAKS:
                break
            if heredoc := _HEREDOC.match(self.text, self.at):
                self._awaited.append(heredoc[2])
                self.at, redirected = heredoc.end(), True
            elif redirection := re.compile(r"\d*(&>>?|[<>]+&?)").match(self.text, self.at):
                self.at, redirected = redirection.end(), True
                self._skip_blanks()
                self._word()
            else:
                word = self._word()
                if (
                    self.at < len(self.text)
                    and self.text[self.at] == "("
                    and word[-1:]
                    and word[-1].text.endswith("=")
                ):
                    command.arrays[len(command.words)] = self._array()
                command.words.append(word)
                if not redirected:
                    command.end = self.at
        return command

    def _array(self) -> list[Word]:
        opened = self.at
        self.at += 1
        elements: list[Word] = []
        while True:
            self._skip_blanks()
            if self.at >= len(self.text):
                raise self._fail(opened, "the bracket of an array")
            if self.text[self.at] == ")":
                self.at += 1
                return elements
            if self.text[self.at] in "\n":
                self.at += 1
            elif self.text[self.at] in _BREAKS:
                raise ShellError(f"line {self._line(self.at)}: {self.text[self.at]!r} stands in an array")
            else:
                elements.append(self._word())

    def _word(self) -> Word:
        parts: list[Part] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t\r<>" or char in _BREAKS:
                break
            if char == "\\":
                if self.text.startswith("\\\n", self.at):
                    break
                parts.append(Part(self.text[self.at + 1 : self.at + 2], quoted=True))
                self.at += 2
            elif char == "'":
                parts.append(Part(self._until("'"), quoted=True))
            elif char == '"':
                parts += self._double()
            elif char in "$`":
                parts.append(self._computed(quoted=False))
            else:
                end = re.compile(r"[\s\\'\"$`<>;&|()]").search(self.text, self.at)
                stop = end.start() if end else len(self.text)
                parts.append(Part(self.text[self.at : stop]))
                self.at = stop
        return tuple(parts)

    def _until(self, quote: str) -> str:
        opened, end = self.at, self.text.find(quote, self.at + 1)
        if end < 0:
            raise self._fail(opened, f"the quote {quote}")
        self.at = end + 1
        return self.text[opened + 1 : end]

    def _double(self) -> list[Part]:
        opened = self.at
        self.at += 1
        parts: list[Part] = []
        text = ""
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == '"':
                self.at += 1
                return [*parts, Part(text, quoted=True)]
            if char == "\\" and self.at + 1 < len(self.text):
                follows = self.text[self.at + 1]
                text += "" if follows == "\n" else follows if follows in '"\\$`' else char + follows
                self.at += 2
            elif char in "$`":
                computed = self._computed(quoted=True)
                parts += [Part(text, quoted=True), computed]
                text = ""
            else:
                text += char
                self.at += 1
        raise self._fail(opened, 'the quote "')

    def _computed(self, quoted: bool) -> Part:
        """A variable, an arithmetic expression, or what only a shell can say."""
        start = self.at
        if self.text[start] == "`":
            text = self._until("`")
            return Part(text, "computed", quoted, f"`{text}`")
        if self.text.startswith("$((", start):
            inner = self._closing(start + 1, "(", ")")[2:-2]
            return Part(inner, "arithmetic", quoted, self.text[start : self.at])
        if self.text.startswith("$(", start):
            self._closing(start + 1, "(", ")")
            return Part(self.text[start : self.at], "computed", quoted, self.text[start : self.at])
        if self.text.startswith("${", start):
            inner = self._closing(start + 1, "{", "}")[1:-1]
            raw = self.text[start : self.at]
            form = re.fullmatch(r"([A-Za-z_]\w*)(\[[@*]\])?(?::?[-=](.*))?", inner, re.DOTALL)
            if form is None:
                return Part(raw, "computed", quoted, raw)
            return Part(form[1], "array" if form[2] else "variable", quoted, raw, form[3])
        if name := _NAME.match(self.text, start + 1):
            self.at = name.end()
            return Part(name[0], "variable", quoted, self.text[start : self.at])
        special = re.compile(r"\$[@*#?$!\d-]").match(self.text, start)
        self.at = special.end() if special else start + 1
        raw = self.text[start : self.at]
        return Part(raw, "computed" if special else "text", quoted, raw)

    def _closing(self, start: int, opens: str, closes: str) -> str:
        depth, at = 0, start
        while at < len(self.text):
            depth += (self.text[at] == opens) - (self.text[at] == closes)
            at += 1
            if depth == 0:
                self.at = at
                return self.text[start:at]
        raise self._fail(start, f"the bracket {opens}")
