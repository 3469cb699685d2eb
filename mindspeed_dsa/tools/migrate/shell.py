"""Shell scripts: the command that starts the training, with its variables put in."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mindspeed_dsa.tools.migrate.job import FLAG, Source
from mindspeed_dsa.tools.migrate.shell_words import Command, Part, ShellError, Word, commands

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
_BARE, _QUOTED = "\ue000", "\ue001"
"""Mark what stays as it is written, outside of quotes and in them; its number lies between two of them."""
_HELD = re.compile(rf"[{_BARE}{_QUOTED}](\d+)[{_BARE}{_QUOTED}]")
_EXPANDED = frozenset("~*?[{")
"""Characters that a shell expands where they are not quoted."""
_ALL_OF = re.compile(r"\$[@*]|\$\{[@*].*\}|\$\{\w+\[[@*]\].*\}|\$\{\w+:?\+.*\}", re.DOTALL)
"""Any number of words: a script's own arguments, an array, or words under a condition."""


@dataclass(frozen=True)
class Start:
    """The command that starts the training.

    Attributes:
        launcher: its words up to the script, as written.
        script: the Python script or ``-m module``.
        words: of the script's own command line, variables put in.
        written: the same in the shell's notation, with variables left in place where they hold no flags.
        rest: what stands for any number of flags, such as ``"$@"``, in the shell's notation.
        start, end: where the command lies in the text.
        notes: what was not read, or read with a doubt.
    """

    launcher: tuple[Source, ...]
    script: str
    words: tuple[str, ...]
    written: tuple[Source, ...]
    rest: tuple[Source, ...]
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
        other = _script([self._show(word) for word in written])
        if other is None:
            written, other = values, place
        launcher = tuple(map(self._source, written[: other + 1]))
        values, script = values[place + 1 :], _named(values, place)
        rest = tuple(self._source(word) for word in written[other + 1 :] if self._any_number(word))
        values, written = (
            [word for word in each if not self._any_number(word)] for each in (values, written[other + 1 :])
        )
        if self._names(values) != self._names(written):
            written = values
        notes = list(self._notes)
        if self.found is not None:
            notes.append(f"{self.found.script} is started before; only {script} is looked at")
        if self._doubtful:
            names = ", ".join(dict.fromkeys(self._doubtful))
            notes.append(
                f"variables that are set under a condition or in a loop are taken as last set: {names}"
            )
        notes += [f"{text} stays at the end; flags that come by it are not looked at" for text in rest]
        self.found = Start(
            launcher,
            script,
            tuple(map(self._show, values)),
            tuple(map(self._source, written)),
            rest,
            command.start,
            command.end,
            tuple(notes),
        )

    def _show(self, text: str) -> str:
        return _HELD.sub(lambda match: self._held[int(match[1])], text)

    def _hold(self, raw: str) -> str:
        self._held.append(raw)
        return f"{_BARE}{len(self._held) - 1}{_BARE}"

    def _any_number(self, field: str) -> bool:
        match = _HELD.fullmatch(field)
        return match is not None and _ALL_OF.fullmatch(self._held[int(match[1])]) is not None

    def _names(self, fields: Sequence[str]) -> list[str]:
        return [word.partition("=")[0] for word in map(self._source, fields) if FLAG.match(word)]

    def _source(self, text: str) -> Source:
        """A field as a shell reads it back: texts in quotes, and what is held as it was written."""
        name = re.match(r"(--?[A-Za-z][\w-]*=?)?", text)[0]  # type: ignore[index]
        found = re.findall(
            rf"([^{_BARE}{_QUOTED}]+)|([{_BARE}{_QUOTED}])(\d+)[{_BARE}{_QUOTED}]", text[len(name) :]
        )
        pieces = [(self._held[int(number)], mark) if mark else (plain, "") for plain, mark, number in found]
        pieces = [
            (f"${{{one[1:]}}}" if mark and _continues(one, *after) else one, mark)
            for (one, mark), after in pairwise([*pieces, ("", "")])
        ]
        marks = {mark for _, mark in pieces}
        if marks == {_QUOTED, ""} and not any(set(one) & set('"$`\\!') for one, mark in pieces if not mark):
            return Source(name + '"' + "".join(one for one, _ in pieces) + '"')
        shown: dict[str, Callable[[str], str]] = {"": shlex.quote, _QUOTED: '"{}"'.format, _BARE: str}
        return Source(name + "".join(shown[mark](one) for one, mark in pieces) or "''")

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
                building = (building or "") + " ".join(values).replace(_BARE, _QUOTED)
                continue
            if part.kind == "text":
                expands = written and set(part.text) & _EXPANDED
                building = (building or "") + (self._hold(part.text) if expands else part.text)
                continue
            if not part.quoted:
                values = [value.replace(_QUOTED, _BARE) for value in values]
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


def _continues(held: str, text: str, mark: str) -> bool:
    """Whether a shell would read a text as part of the name of the variable before it."""
    named = re.fullmatch(r"\$[A-Za-z_]\w*", held) is not None
    return named and not mark and re.match(r"[\w\[]", text) is not None


def _named(words: Sequence[str], place: int) -> str:
    return " ".join(words[place - 1 : place + 1]) if words[place - 1] == "-m" else words[place]


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
