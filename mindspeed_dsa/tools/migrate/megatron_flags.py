"""Record of Megatron-LM's flags by release, parsers built from it, and the command that updates it.

``python -m mindspeed_dsa.tools.migrate.megatron_flags RELEASE [FILE]`` adds the parser of the Megatron-LM on
the path, a checkout of that release, to the record.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from packaging.version import Version

from mindspeed_dsa import session
from mindspeed_dsa.patches.errors import SettingsError


def pattern(text: str) -> int | list[int]:
    """Parse a value of ``--moe-layer-freq``: ``2``, ``[0,1,1]`` or ``([0]*1+[1]*3)``."""

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.List):
            return [value(item) for item in node.elts]
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Add)):
            left, right = value(node.left), value(node.right)
            return left * right if isinstance(node.op, ast.Mult) else left + right
        raise ValueError

    try:
        parsed: int | list[int] = value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number nor a list such as '([0]*1+[1]*3)'"
        ) from None
    return parsed


class RefusingParser(argparse.ArgumentParser):
    """Parser of a job's flags that raises :class:`SettingsError` instead of ending the process.

    Args:
        who: beginning of its messages, such as ``mindspeed_dsa plan``.
        options: keyword arguments of ``argparse.ArgumentParser``.
    """

    def __init__(self, who: str, **options: Any) -> None:
        super().__init__(**options)
        self._who = who

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{self._who}: {message}")


RECORD = Path(__file__).with_name("megatron_flags.json")
_TYPES: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "pattern": pattern}
"""Dict from kind to converter of values; values of other kinds stay strings."""
_UNSET = {"on": False, "off": True}
"""Defaults of switches, omitted in the record; flags with a value default to None."""
_Parser = TypeVar("_Parser", bound=argparse.ArgumentParser)


@cache
def _kept() -> tuple[tuple[str, ...], dict[str, list[list[Any]]]]:
    """Return the recorded releases, and a dict from flag to its variants.

    A variant is a list: string with a bit per release that has it, kind, other properties.
    """
    kept = json.loads(RECORD.read_text(encoding="utf-8"))
    return tuple(kept["releases"]), kept["flags"]


@cache
def record() -> dict[str, tuple[str, ...]]:
    """Return a dict from flag to the recorded releases that have it, oldest first."""
    return {
        flag: tuple(
            release
            for position, release in enumerate(releases())
            if any(bits[position] == "1" for bits, *_ in variants)
        )
        for flag, variants in _kept()[1].items()
    }


def releases() -> tuple[str, ...]:
    """Return the recorded releases, oldest first."""
    return _kept()[0]


def around(release: Version | None) -> list[str]:
    """Return the recorded releases closest to ``release``: the last one before it and the first one after it.

    Args:
        release: Megatron-LM release. If it is recorded, only it is returned; None means the newest.
    """
    if release is None:
        return [releases()[-1]]
    older = [each for each in releases() if Version(each) <= release]
    newer = [each for each in releases() if Version(each) >= release]
    return list(dict.fromkeys([*older[-1:], *newer[:1]]))


def lacks(flag: str, release: Version | None) -> str:
    """Return text about the releases that have a flag if ``release`` lacks it, else an empty string.

    Args:
        flag: flag with dashes.
        release: Megatron-LM release; None for the newest. A release between two recorded ones counts as the
            older one.
    """
    having = record().get(flag)
    if having is None:
        return ""
    older = [each for each in releases() if release is None or Version(each) <= release]
    if not older or older[-1] in having:
        return ""
    first, last = having[0], having[-1]
    return f"{first} to {last}" if last != releases()[-1] else f"{first} and later"


def add_recorded(parser: _Parser, release: Version | None) -> _Parser:
    """Add a release's flags to a parser, with their types, choices and defaults.

    Args:
        parser: parser to add to.
        release: Megatron-LM release; None for the newest. For a release between two recorded ones, the flags
            of both are added, preferably as in the older one.
    """
    for position in map(releases().index, around(release)):
        for flag, variants in _kept()[1].items():
            # bits has one digit per recorded release: "0011" is a variant of the two newest of four.
            for bits, kind, *rest in variants:
                if bits[position] == "1" and flag not in parser._option_string_actions:
                    _add(parser, flag, kind, dict(*rest))
    return parser


def add_installed(parser: _Parser, root: str = "megatron") -> _Parser:
    """Add the flags of the installed Megatron-LM to a parser.

    Raises:
        ModuleNotFoundError: only megatron-core is installed.
    """
    import_module(f"{root}.training.arguments").add_megatron_arguments(parser)
    return parser


def of_parser(parser: argparse.ArgumentParser) -> list[str]:
    """Return all long options of a parser."""
    return sorted(name for name in parser._option_string_actions if name.startswith("--"))


def _add(parser: argparse.ArgumentParser, flag: str, kind: str, rest: dict[str, Any]) -> None:
    common = {"dest": flag[2:].replace("-", "_"), "default": _UNSET.get(kind)} | rest
    if kind in _UNSET:
        parser.add_argument(flag, action="store_true" if kind == "on" else "store_false", **common)
    else:
        parser.add_argument(flag, type=_TYPES.get(kind, str), **common)


def described(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[Any]]]:
    """Yield a parser's long options in the record's form: kind, and properties unusual for it."""
    defaults: dict[str, Any] = {}
    for action in parser._actions:
        defaults.setdefault(action.dest, action.default)  # as in argparse, the first action of a dest counts
    for flag in of_parser(parser):
        action = parser._option_string_actions[flag]
        if action.dest != "help":
            kind = _kind(action, flag)
            rest: dict[str, Any] = {"dest": action.dest, "default": _plain(defaults[action.dest])}
            if kind not in _UNSET and action.nargs is not None:
                rest["nargs"] = action.nargs
            if kind not in _UNSET and action.choices and not isinstance(next(iter(action.choices)), Enum):
                rest["choices"] = [choice for choice in action.choices if choice is not None]
            usual = {"dest": flag[2:].replace("-", "_"), "default": _UNSET.get(kind)}
            rest = {name: value for name, value in rest.items() if name not in usual or value != usual[name]}
            yield flag, [kind, rest] if rest else [kind]


def _kind(action: argparse.Action, flag: str) -> str:
    if action.nargs == 0:
        negated = isinstance(action, argparse.BooleanOptionalAction) and flag.startswith("--no-")
        return "off" if negated or action.const is False else "on"
    name = getattr(action.type, "__name__", "")
    return "pattern" if name.endswith("freq_type") else name if name in _TYPES else "str"


def _plain(value: Any) -> Any:
    return value.name if isinstance(value, Enum) else list(value) if isinstance(value, tuple) else value


def add(release: str, parser: argparse.ArgumentParser, file: Path = RECORD) -> None:
    """Add a release to the record, or replace a recorded one."""
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"releases": [], "flags": {}}
    having = {
        core: {
            flag: said
            for flag, variants in kept["flags"].items()
            for bits, *said in variants
            if bits[number] == "1"
        }
        for number, core in enumerate(kept["releases"])
    }
    having[release] = dict(described(parser))
    order = sorted(having, key=Version)
    lines = []
    for flag in sorted(set().union(*having.values())):
        variants: dict[str, str] = {}
        for core in order:
            if flag in having[core]:
                words = json.dumps(having[core][flag], sort_keys=True)
                variants[words] = "".join("01"[having[one].get(flag) == having[core][flag]] for one in order)
        made = [[bits, *json.loads(words)] for words, bits in variants.items()]
        lines.append(f"{json.dumps(flag)}: {json.dumps(made)}")
    text = f'{{"releases": {json.dumps(order)},\n"flags": {{\n' + ",\n".join(lines) + "\n}}\n"
    file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    session.enable_from_argv(
        []
    )  # Megatron-LM's modules are imported on machines without an accelerator as well
    made = add_installed(argparse.ArgumentParser(allow_abbrev=False))
    add(sys.argv[1], made, Path(sys.argv[2]) if sys.argv[2:] else RECORD)
