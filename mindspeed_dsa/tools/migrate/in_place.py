"""Replacement of flags in a shell script at their positions: in arrays, strings and the command.

Edits replace words of the text by position. The result is parsed again, and is used only if it yields the
translated flags. Otherwise the caller writes all flags after the command.
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
    """Range ``start:end`` of the text that has flags: a variable's value, or the command (no name)."""

    name: str
    start: int
    end: int
    quotes: bool = False


@dataclass(frozen=True)
class _Place:
    """A flag with its values, from ``start`` to ``end`` in the text; the flag's name ends at ``name_end``."""

    area: _Area
    flag: str
    start: int
    name_end: int
    end: int


def rewrite(text: str, start: Start, given: Sequence[Given], found: Translation) -> str | None:
    """Replace a script's old flags by the new ones.

    Args:
        text: script's text.
        start: command that starts the training.
        given: old flags, in order.
        found: translation of the old flags.

    Returns:
        New text; None if an old flag is not in the text, or the new text does not yield the translated flags.
    """
    edits: list[tuple[int, int, str]] = []
    behind: list[str] = []
    places: dict[str, list[_Place]] = {}
    for place in _places(text, start):
        places.setdefault(place.flag, []).append(place)
    old = {flag_given.flag: flag_given for flag_given in given}
    kept = {id(flag_given) for flag_given in found.flags}
    for flag, new in _new(given, found).items():
        if flag not in places:
            return None
        first, *others = places[flag]
        # A flag may be in the script several times: the new flag replaces the first, the others are removed.
        edits += [_edit(text, other, []) for other in others if id(old[flag]) not in kept]
        lines = [text[first.start : first.end]] if id(old[flag]) in kept else []
        for flag_given in new:
            line = _line(text, first, old[flag], flag_given)
            (behind if line is None else lines).append(line or _of(flag_given))
        edits.append(_edit(text, first, lines))
    edits.append((start.end, start.end, "".join(f" \\\n    {line}" for line in behind)))
    # From the end of the text to its start, so that earlier positions stay valid.
    for begin, end, line in sorted(edits, reverse=True):
        text = text[:begin] + line + text[end:]
    return text if _gives(text, start, found) else None


def _new(given: Sequence[Given], found: Translation) -> dict[str, list[Given]]:
    """Return a dict from old flag to the new flags in its position; an empty list removes the old flag."""
    old, kept = (
        {flag_given.flag: flag_given for flag_given in given},
        {id(flag_given) for flag_given in found.flags},
    )
    new: dict[str, list[Given]] = {flag: [] for flag, flag_given in old.items() if id(flag_given) not in kept}
    for flag_given in found.flags:
        if not any(flag_given is one for one in given):
            place = flag_given.flag if flag_given.flag in old else found.places[flag_given.flag]
            new.setdefault(place, []).append(flag_given)
    return new


def _gives(text: str, start: Start, found: Translation) -> bool:
    """Return whether the script ``text`` starts the same program as ``start``, with the translated flags."""
    try:
        again = shell.read(text)
    except ShellError:
        return False
    first, flags = split(again.words)
    before, _ = split(start.words)
    same = again.launcher == start.launcher and again.rest == start.rest and first == before
    return same and _read(flags) == _read(found.flags)


def _read(flags: Sequence[Given]) -> tuple[dict[str, str], set[str]]:
    """Return the last value of each flag, and all (flag, value) pairs for flags that collect values.

    Variables without a value in the script are left out, as they may follow another flag in the new script.
    """
    said = [(each.flag, [word for word in each.values if not _VARIABLE.fullmatch(word)]) for each in flags]
    return {flag: " ".join(values) for flag, values in said}, {f"{flag} {values}" for flag, values in said}


# -- places ------------------------------------------------------------------------------------


def _places(text: str, start: Start) -> Iterator[_Place]:
    """Yield the flags in the command and in the variables that it uses, in the order of the text."""
    assigned = [
        _Area(name, begin + 1, end - 1, text[begin] != "(")
        if text[begin] in "(\"'" and text[end - 1] in ")\"'"
        else _Area(name, begin, end)
        for name, begin, end in shell.assignments(text)
    ]
    command = _Area("", start.start, start.end)
    # Variables used by the command, directly or inside of other variables.
    reached, waiting = {""}, [command]
    while waiting:
        area = waiting.pop()
        names = {match[1] for match in _NAME.finditer(text, area.start, area.end)} - reached
        reached |= names
        waiting += [area_ for area_ in assigned if area_.name in names]
    holding = {area_.name for area_ in assigned if "--" in text[area_.start : area_.end]}
    areas = [area_ for area_ in (*assigned, command) if area_.name in reached]
    for area in sorted(areas, key=lambda each: each.start):
        yield from _of_area(text, area, holding)


def _of_area(text: str, area: _Area, holding: set[str]) -> Iterator[_Place]:
    """Yield the flags in one area. A variable that contains flags ends the values of the flag before it."""
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
    """Return the text of flag ``new`` in the position of ``old``; None if quotes there do not allow it."""
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
    """Return the edit ``(begin, end, new text)`` that replaces a flag by ``lines``.

    If the old flag is alone on its line, each new flag gets its own line.
    """
    begin = text.rfind("\n", 0, place.start) + 1
    indent = text[begin : place.start]
    behind = _END.match(text, place.end)
    alone = behind is not None and not indent.strip() and begin > place.area.start
    if not alone or behind is None:
        # If the flag is removed, remove the blanks before it, too.
        begin = place.start if lines else len(text[: place.start].rstrip(" \t"))
        return begin, place.end, " ".join(lines)
    continued = bool(behind[1])
    if not lines and (continued or place.area.name) and behind.end() <= place.area.end:
        # Alone on its line: remove the line with its line break.
        return begin, behind.end(), ""
    between = f" \\\n{indent}" if continued or not place.area.name else f"\n{indent}"
    return place.start, place.end, between.join(lines)
