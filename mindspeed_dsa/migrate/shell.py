"""Shell scripts: the command that starts the training, with its variables put in."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_dsa.migrate.shell_words import Command, Part, ShellError, Word, commands

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_OPENING = ("if", "for", "while", "until", "case", "select")
_CLOSING = ("fi", "done", "esac")
_KEYWORDS = (*_OPENING, *_CLOSING, "then", "else", "elif", "do", "{", "}", "!", "time", "function")
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_HELD = "\ue000"
"""Marks what stays as it is written, so that its blanks do not split words; followed by its number."""


@dataclass(frozen=True)
class Start:
    """The command that starts the training.

    Attributes:
        launcher: its words up to the script, as written.
        script: the Python script or ``-m module``.
        words: of the script's own command line, variables put in.
        written: the same with variables left in place, where they hold single values.
        start, end: where the command lies in the text.
        notes: what was not read, or read with a doubt.
    """

    launcher: tuple[str, ...]
    script: str
    words: tuple[str, ...]
    written: tuple[str, ...]
    start: int
    end: int
    notes: tuple[str, ...]


def read(text: str) -> Start:
    """Find the last command that starts a Python script with flags.

    Raises:
        ShellError: there is none, or the text is no shell script.
    """
    reader = _Script()
    for command in commands(text):
        reader.take(command)
    if reader.found is None:
        raise ShellError("no command in it starts a Python script with flags")
    return reader.found


class _Script:
    """Variables so far, once with their values and once as they are written."""

    def __init__(self) -> None:
        self.found: Start | None = None
        self._values: dict[str, str | list[str]] = {}
        self._written: dict[str, str | list[str]] = {}
        self._held: list[str] = []
        self._depth = 0
        self._doubtful: list[str] = []
        self._notes: list[str] = []

    def take(self, command: Command) -> None:
        """Set variables, or look whether this starts the training."""
        words, shift = command.words, 0
        while words and (keyword := _literal(words[0])) in _KEYWORDS:
            self._depth += (keyword in _OPENING) - (keyword in _CLOSING)
            words, shift = words[1:], shift + 1
        if words and _literal(words[0]) in _DECLARING:
            words, shift = words[1:], shift + 1
            while words and _literal(words[0]).startswith("-"):
                words, shift = words[1:], shift + 1
        if words and _literal(words[0]) in ("source", "."):
            self._notes.append(f"line {command.line}: what {_literal(words[-1])} sets is not read")
        for place, word in enumerate(words):
            match = _ASSIGNMENT.match(word[0].text) if word and word[0].kind == "text" else None
            if match is None:
                if place == 0 or not _ASSIGNMENT.match(word[0].text if word else ""):
                    self._look(command, words[place:])
                return
            self._assign(match, word, command.arrays.get(place + shift))

    def _assign(self, match: re.Match[str], word: Word, elements: list[Word] | None) -> None:
        name, adds = match[1], bool(match[2])
        rest = (Part(word[0].text[match.end() :], quoted=word[0].quoted), *word[1:])
        if self._depth:
            self._doubtful.append(name)
        for store, written in ((self._values, False), (self._written, True)):
            new: str | list[str]
            if elements is None:
                new = self._joined(rest, written)
            else:
                new = [field for element in elements for field in self._fields(element, written)]
            old = store.get(name)
            if adds and isinstance(old, list):
                new = [*old, *([new] if isinstance(new, str) else new)]
            elif adds and isinstance(old, str) and isinstance(new, str):
                new = old + new
            store[name] = new

    def _look(self, command: Command, words: Sequence[Word]) -> None:
        values = [field for word in words for field in self._fields(word, written=False)]
        place = _script(values)
        if place is None or not any(value.startswith("--") for value in values[place + 1 :]):
            return
        written = [field for word in words for field in self._fields(word, written=True)]
        other = _script(written)
        if other is None:
            written, other = values, place
        notes = list(self._notes)
        if self.found is not None:
            notes.append(f"{self.found.script} is started before; only {values[place]} is looked at")
        if self._doubtful:
            names = ", ".join(dict.fromkeys(self._doubtful))
            notes.append(
                f"variables that are set under a condition or in a loop are taken as last set: {names}"
            )
        self.found = Start(
            tuple(map(self._show, written[: other + 1])),
            " ".join(values[place - 1 : place + 1]) if values[place - 1] == "-m" else values[place],
            tuple(map(self._show, values[place + 1 :])),
            tuple(map(self._show, written[other + 1 :])),
            command.start,
            command.end,
            tuple(notes),
        )

    def _show(self, text: str) -> str:
        return re.sub(rf"{_HELD}(\d+){_HELD}", lambda match: self._held[int(match[1])], text)

    def _hold(self, raw: str) -> str:
        self._held.append(raw)
        return f"{_HELD}{len(self._held) - 1}{_HELD}"

    def _joined(self, word: Word, written: bool) -> str:
        """A word without splitting, as in an assignment."""
        return "".join(" ".join(self._value(part, written)) for part in word)

    def _fields(self, word: Word, written: bool) -> list[str]:
        """A word as a shell splits it after variables are put in."""
        fields: list[str] = []
        building: str | None = None
        for part in word:
            values = self._value(part, written)
            if part.quoted and part.kind != "array":
                building = (building or "") + " ".join(values)
                continue
            if part.kind == "text":
                building = (building or "") + part.text
                continue
            pieces = values if part.quoted else [piece for value in values for piece in value.split()]
            if not pieces:
                continue
            if part.kind != "array" and values[0][:1].isspace() and building is not None:
                fields.append(building)
                building = None
            *whole, last = pieces
            for piece in whole:
                fields.append((building or "") + piece)
                building = None
            building = (building or "") + last
        return fields if building is None else [*fields, building]

    def _value(self, part: Part, written: bool) -> list[str]:
        """What a part stands for; where ``written``, variables of single values stay."""
        if part.kind == "text":
            return [part.text]
        if part.kind == "computed":
            return [self._hold(part.raw)]
        if part.kind == "arithmetic":
            number = None if written else self._calculated(part.text)
            return [self._hold(part.raw) if number is None else str(number)]
        value = self._values.get(part.text, part.default)
        if value is None or (written and not _has_flags(value)):
            return [self._hold(part.raw)]
        stored = self._written.get(part.text, value) if written else value
        if isinstance(stored, list):
            return stored if part.kind == "array" else stored[:1]
        return [stored]

    def _calculated(self, text: str) -> int | None:
        def put(match: re.Match[str]) -> str:
            value = self._values.get(match[1])
            return value if isinstance(value, str) and value.strip().isdigit() else match[0]

        try:
            return _evaluate(
                ast.parse(re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", put, text).strip(), mode="eval").body
            )
        except (SyntaxError, ValueError, ZeroDivisionError):
            return None


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError(ast.dump(node))


def _literal(word: Word) -> str:
    return "".join(part.text if part.kind == "text" else part.raw for part in word)


def _has_flags(value: Any) -> bool:
    words = value if isinstance(value, list) else value.split()
    return any(word.startswith("--") for word in words) or isinstance(value, list)


def _script(words: Sequence[str]) -> int | None:
    """Place of the Python script, or of the module behind ``-m`` that is not a launcher."""
    for place, word in enumerate(words):
        if word.endswith(".py") and not word.startswith("-"):
            return place
        if place and words[place - 1] == "-m" and not word.startswith("torch.distributed"):
            return place if "python" in words[0] or place > 1 else None
    return None
