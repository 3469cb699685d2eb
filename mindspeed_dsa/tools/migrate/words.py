"""Words of a shell script: what a program reads of them, and what the new script keeps as it is written."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise

from mindspeed_dsa.tools.migrate.job import Source

_ALL_OF = re.compile(r"\$[@*]|\$\{[@*].*\}|\$\{\w+\[[@*]\].*\}|\$\{\w+:?\+.*\}", re.DOTALL)
"""Any number of words: a script's own arguments, an array, or words under a condition."""


@dataclass(frozen=True)
class Held:
    """Part of a word that the new script keeps as it is written.

    Attributes:
        source: in the shell's notation, without quotes around it.
        quoted: whether it stands in quotes, so that its value is not split into words.
        value: parts that it stands for; ``None`` where only a shell knows.
    """

    source: str
    quoted: bool
    value: Field | None = None


Field = tuple["str | Held", ...]
"""One word: texts, and what is held between them."""
Item = str | Held | None
"""A part of a word; ``None`` where a word ends, and another one begins."""


def fields(items: Iterable[Item]) -> list[Field]:
    """Gather parts to words."""
    runs = groupby(items, lambda item: item is None)
    return [tuple(item for item in run if item is not None) for ended, run in runs if not ended]


def split(field: Field) -> Iterator[Item]:
    """Yield the parts of a value outside of quotes, where blanks end words."""
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
    """Return a value in quotes: one word, even if it is empty."""
    return "", *(replace(part, quoted=True) if isinstance(part, Held) else part for part in field)


def computed(field: Field) -> Iterator[Item]:
    """Yield the parts of a word with their values, as far as they are known."""
    for part in field:
        if isinstance(part, str) or part.value is None:
            yield part
        else:
            value = tuple(item for item in computed(part.value) if item is not None)
            yield from quoted(value) if part.quoted else split(value)


def inlined(field: Field, name: str) -> Field:
    """Put the former value of a variable into its new one, where that refers to itself."""
    itself = re.compile(rf"\$\{{?{name}(?!\w).*", re.DOTALL)
    parts = (
        part.value
        if isinstance(part, Held) and part.value is not None and itself.match(part.source)
        else (part,)
        for part in field
    )
    return tuple(chain.from_iterable(parts))


def value_text(field: Field) -> str:
    """Return a value as text, with a null where only a shell knows."""
    parts = computed(quoted(field))
    return "".join(part if isinstance(part, str) else "\0" for part in parts if part is not None)


def has_flags(value: Field) -> bool:
    """Return whether a word of a value begins with two dashes."""
    return any(word.startswith("--") for word in value_text(value).split())


def shown(field: Field) -> str:
    """Return a word as text, with the source of what is held."""
    return "".join(part if isinstance(part, str) else part.source for part in field)


def any_number(field: Field) -> bool:
    """Return whether a word stands for any number of words."""
    parts = [part for part in field if part]
    return len(parts) == 1 and isinstance(parts[0], Held) and _ALL_OF.fullmatch(parts[0].source) is not None


def source(field: Field) -> Source:
    """Write a word as a shell reads it back: texts in quotes, and what is held as it was written."""
    parts: list[str | Held] = []
    for part in field:
        if isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts[-1] += part
        elif part:
            parts.append(part)
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
    """Return whether a shell would read a text as part of the name of the variable before it."""
    return bool(re.fullmatch(r"\$[A-Za-z_]\w*", variable) and re.match(r"[\w\[]", text))
