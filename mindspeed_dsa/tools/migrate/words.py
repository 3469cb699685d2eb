"""Words of a shell script: their expanded values, and their text in the new script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise

from mindspeed_dsa.tools.migrate.job import Source

_ALL_OF = re.compile(r"\$[@*]|\$\{[@*].*\}|\$\{\w+\[[@*]\].*\}|\$\{\w+:?\+.*\}", re.DOTALL)
"""Expansion to any number of words: the script's own arguments, an array, or a conditional ``${X:+...}``."""


@dataclass(frozen=True)
class Held:
    """Part of a word that the new script keeps in shell notation, such as ``$X`` or ``$(date)``.

    Attributes:
        source: text in shell notation, without quotes around it.
        quoted: whether the part is in quotes, so that its value is not split into words.
        value: expanded value; None if only a shell can evaluate it.
    """

    source: str
    quoted: bool
    value: Field | None = None


Field = tuple["str | Held", ...]
"""A word: a sequence of plain texts and :class:`Held` parts."""
Item = str | Held | None
"""A part of a word, or None between two words."""


def fields(items: Iterable[Item]) -> list[Field]:
    """Group parts into words, which are separated by None."""
    runs = groupby(items, lambda item: item is None)
    return [tuple(item for item in run if item is not None) for ended, run in runs if not ended]


def split(field: Field) -> Iterator[Item]:
    """Split an unquoted value at blanks; yield its parts, with None between two words."""
    for part in field:
        if isinstance(part, Held):
            yield replace(part, quoted=False)
            continue
        for place, word in enumerate(re.split(r"\s+", part)):
            if place:
                yield None
            if word:
                yield word


def quoted(field: Field) -> Field:
    """Return the field as a quoted value: it stays one word, even if it is empty."""
    return "", *(replace(part, quoted=True) if isinstance(part, Held) else part for part in field)


def computed(field: Field) -> Iterator[Item]:
    """Yield the parts of a word, with variables of known value expanded."""
    for part in field:
        if isinstance(part, str) or part.value is None:
            yield part
        else:
            value = tuple(item for item in computed(part.value) if item is not None)
            yield from quoted(value) if part.quoted else split(value)


def inlined(field: Field, name: str) -> Field:
    """Return the new value of variable ``name``, with references to itself (``X="$X --flag"``) expanded."""
    itself = re.compile(rf"\$\{{?{name}(?!\w).*", re.DOTALL)
    parts = (
        part.value
        if isinstance(part, Held) and part.value is not None and itself.match(part.source)
        else (part,)
        for part in field
    )
    return tuple(chain.from_iterable(parts))


def value_text(field: Field) -> str:
    """Return a value as text, with a null byte in place of each part that only a shell can evaluate."""
    parts = computed(quoted(field))
    return "".join(part if isinstance(part, str) else "\0" for part in parts if part is not None)


def has_flags(value: Field) -> bool:
    """Return whether any word of a value begins with two dashes."""
    return any(word.startswith("--") for word in value_text(value).split())


def shown(field: Field) -> str:
    """Return a word as text, with :class:`Held` parts in shell notation."""
    return "".join(part if isinstance(part, str) else part.source for part in field)


def any_number(field: Field) -> bool:
    """Return whether a word may expand to any number of words."""
    parts = [part for part in field if part]
    return len(parts) == 1 and isinstance(parts[0], Held) and _ALL_OF.fullmatch(parts[0].source) is not None


def source(field: Field) -> Source:
    """Return a word in shell notation: plain texts quoted, :class:`Held` parts as in the old script."""
    parts: list[str | Held] = []
    for part in field:
        if isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts[-1] += part
        elif part:
            parts.append(part)
    # --flag="value" reads better than '--flag=value', so the flag's name stays outside of the quotes.
    name = ""
    if parts and isinstance(parts[0], str):
        name = re.match(r"(--?[A-Za-z][\w-]*=?)?", parts[0])[0]  # type: ignore[index]
        parts[:1] = [parts[0][len(name) :]] if parts[0] != name else []
    parts = [
        replace(part, source=f"${{{part.source[1:]}}}")
        if isinstance(part, Held) and isinstance(after, str) and _continues(part.source, after)
        else part
        for part, after in pairwise([*parts, ""])
    ]
    texts = [part for part in parts if isinstance(part, str)]
    in_one = len(texts) < len(parts) and all(isinstance(part, str) or part.quoted for part in parts)
    if texts and in_one and not set("".join(texts)) & set('"$`\\!'):
        return Source(f'{name}"{shown(tuple(parts))}"')
    texts = [
        shlex.quote(part) if isinstance(part, str) else f'"{part.source}"' if part.quoted else part.source
        for part in parts
    ]
    return Source(name + "".join(texts) or "''")


def _continues(variable: str, text: str) -> bool:
    """Return whether ``text`` after ``$variable`` would be read as part of the variable's name."""
    return bool(re.fullmatch(r"\$[A-Za-z_]\w*", variable) and re.match(r"[\w\[]", text))
