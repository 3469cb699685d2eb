"""New flags where the old ones stand: in a shell script's arrays, strings and command.

Texts are edited by the places of words, and the result is read again: only a script that gives the translated
flags is handed out. Where none does, the caller writes all flags behind the command.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mindspeed_dsa.tools.migrate import shell
from mindspeed_dsa.tools.migrate.job import FLAG, Given, split
from mindspeed_dsa.tools.migrate.shell import ShellError, Start
from mindspeed_dsa.tools.migrate.translate import Translation, quoted, words

_WORD = re.compile(
    r"""(?:\\\r?\n|\s|(?<!\S)\#[^\n]*)+"""
    r"""|(?P<word>(?:\\[^\r\n]|"(?:\\.|[^"\\])*"|'[^']*'|\$\{[^}]*\}|[^\s"'\\])+)|.""",
    re.DOTALL,
)
_WORD_IN_QUOTES = re.compile(r"(?:\\\r?\n|\s)+|(?P<word>(?:\\[^\r\n]|\$\{[^}]*\}|[^\s\\])+)|.", re.DOTALL)
_NAME = re.compile(r"\$\{?(\w+)")
_VARIABLE = re.compile(r"\$\w+|\$\{\w+\}")
_NOT_IN_QUOTES = frozenset("\"'\\$`! \t\n")
_END = re.compile(r"[ \t]*(\\?)\r?(\n|$)")


@dataclass(frozen=True)
class _Area:
    """Text with flags, from ``start`` to ``end``: the value of a variable, or the command without a name."""

    name: str
    start: int
    end: int
    quotes: bool = False


@dataclass(frozen=True)
class _Place:
    """One flag with its values: from ``start`` to ``end``; ``name_end`` is where the flag's name ends."""

    area: _Area
    flag: str
    start: int
    name_end: int
    end: int


def rewrite(text: str, start: Start, given: Sequence[Given], found: Translation) -> str | None:
    """Write a script's new flags where the old ones stand.

    Args:
        text: the script's text.
        start: command that it starts.
        given: the old flags, in order.
        found: their translation.

    Returns:
        the new text; None where some flag is not found, or the new text does not give the translated flags.
    """
    edits: list[tuple[int, int, str]] = []
    behind: list[str] = []
    places: dict[str, list[_Place]] = {}
    for place in _places(text, start):
        places.setdefault(place.flag, []).append(place)
    old = {each.flag: each for each in given}
    kept = {id(each) for each in found.flags}
    for flag, new in _new(given, found).items():
        if flag not in places:
            return None
        first, *others = places[flag]
        edits += [_edit(text, other, []) for other in others if id(old[flag]) not in kept]
        lines = [text[first.start : first.end]] if id(old[flag]) in kept else []
        for each in new:
            line = _line(text, first, old[flag], each)
            (behind if line is None else lines).append(line or _of(each))
        edits.append(_edit(text, first, lines))
    edits.append((start.end, start.end, "".join(f" \\\n    {line}" for line in behind)))
    for begin, end, line in sorted(edits, reverse=True):
        text = text[:begin] + line + text[end:]
    return text if _gives(text, start, found) else None


def _new(given: Sequence[Given], found: Translation) -> dict[str, list[Given]]:
    """Return new flags by the old one where they go; none for an old one that goes without any."""
    old, kept = {each.flag: each for each in given}, {id(each) for each in found.flags}
    new: dict[str, list[Given]] = {flag: [] for flag, each in old.items() if id(each) not in kept}
    for each in found.flags:
        if not any(each is one for one in given):
            place = each.flag if each.flag in old else found.places[each.flag]
            new.setdefault(place, []).append(each)
    return new


def _gives(text: str, start: Start, found: Translation) -> bool:
    """Return whether a new script starts the same program with the translated flags."""
    try:
        again = shell.read(text)
    except ShellError:
        return False
    first, flags = split(again.words)
    before, _ = split(start.words)
    same = again.launcher == start.launcher and again.rest == start.rest and first == before
    return same and _read(flags) == _read(found.flags)


def _read(flags: Sequence[Given]) -> tuple[dict[str, str], set[str]]:
    """Return what a parser reads: the last value of each flag, and all that a collecting one gets.

    A variable that the script does not set may stand behind another flag in the new script: it is no value.
    """
    said = [(each.flag, [word for word in each.values if not _VARIABLE.fullmatch(word)]) for each in flags]
    return {flag: " ".join(values) for flag, values in said}, {f"{flag} {values}" for flag, values in said}


# -- places ------------------------------------------------------------------------------------


def _places(text: str, start: Start) -> Iterator[_Place]:
    """Yield flags of the command, and of the variables that it is made of, in the order of the text."""
    assigned = [
        _Area(name, begin + 1, end - 1, text[begin] != "(")
        if text[begin] in "(\"'" and text[end - 1] in ")\"'"
        else _Area(name, begin, end)
        for name, begin, end in shell.assignments(text)
    ]
    command = _Area("", start.start, start.end)
    reached, waiting = {""}, [command]
    while waiting:
        area = waiting.pop()
        names = {match[1] for match in _NAME.finditer(text, area.start, area.end)} - reached
        reached |= names
        waiting += [each for each in assigned if each.name in names]
    holding = {each.name for each in assigned if "--" in text[each.start : each.end]}
    areas = [each for each in (*assigned, command) if each.name in reached]
    for area in sorted(areas, key=lambda each: each.start):
        yield from _of_area(text, area, holding)


def _of_area(text: str, area: _Area, holding: set[str]) -> Iterator[_Place]:
    """Yield the flags of one text; a variable that holds flags ends the values before it."""
    pattern = _WORD_IN_QUOTES if area.quotes else _WORD
    flag, begin, name_end, end = "", 0, 0, 0
    for match in pattern.finditer(text, area.start, area.end):
        if match["word"] is None:
            continue
        bare = match["word"].strip("\"'")
        names = set(_NAME.findall(bare)) & holding
        if FLAG.match(bare) or names or bare in ("$@", "$*"):
            if flag:
                yield _Place(area, flag, begin, name_end, end)
            flag = "" if names or bare[0] == "$" else bare.partition("=")[0]
            begin, name_end = match.start("word"), match.start("word") + match["word"].find(flag) + len(flag)
        end = match.end("word")
    if flag:
        yield _Place(area, flag, begin, name_end, end)


# -- edits -------------------------------------------------------------------------------------


def _line(text: str, place: _Place, old: Given, new: Given) -> str | None:
    """Write a new flag as its place takes it; None where it takes no such text."""
    if new.written == old.written and new.values == old.values and text[place.start] == "-":
        return new.flag + text[place.name_end : place.end]
    if not place.area.quotes:
        return _of(new)
    made = words([new], written=True)
    if any(not word or (set(word) & _NOT_IN_QUOTES and not _VARIABLE.fullmatch(word)) for word in made):
        return None
    return " ".join(made)


def _of(new: Given) -> str:
    return " ".join(map(quoted, words([new], written=True)))


def _edit(text: str, place: _Place, lines: Sequence[str]) -> tuple[int, int, str]:
    """Return what replaces a flag: from place to place of the text, new lines as it stands in lines."""
    begin = text.rfind("\n", 0, place.start) + 1
    indent = text[begin : place.start]
    behind = _END.match(text, place.end)
    alone = behind is not None and not indent.strip() and begin > place.area.start
    if not alone or behind is None:
        begin = place.start if lines else len(text[: place.start].rstrip(" \t"))
        return begin, place.end, " ".join(lines)
    continued = bool(behind[1])
    if not lines and (continued or place.area.name) and behind.end() <= place.area.end:
        return begin, behind.end(), ""
    between = f" \\\n{indent}" if continued or not place.area.name else f"\n{indent}"
    return place.start, place.end, between.join(lines)
