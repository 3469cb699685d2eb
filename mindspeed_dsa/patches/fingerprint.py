"""Fingerprints of source code that change when the code changes, and only then.

Two pieces of source have the same fingerprint when they differ only in comments, docstrings, blank lines,
indentation, line breaks, quotes, redundant parentheses or annotations of parameters and results. Taken
from the syntax tree rather than from tokens, whose shape differs between Python versions (f-strings
since 3.12).
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable

LENGTH = 16

# ctx follows from the position; kind and type_comment are spelling; returns and annotations do nothing.
_SILENT = {"ctx", "kind", "type_comment", "type_ignores", "returns"}


def fingerprint(nodes: Iterable[ast.AST], rename: tuple[str, str] | None = None) -> str:
    """Hash of the given syntax trees, in order.

    Args:
        nodes: definitions or expressions.
        rename: top-level package ``(name, stands_for)``: in a fork whose root package has another
            name, code that names its own package has the fingerprint of the original.
    """
    parts: list[str] = []
    for node in nodes:
        _dump(node, parts, rename)
    return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()[:LENGTH]


def _dump(value: object, parts: list[str], rename: tuple[str, str] | None) -> None:
    if isinstance(value, ast.AST):
        parts.append(type(value).__name__)
        for name, item in ast.iter_fields(value):
            # Empty fields are omitted: later Python versions add fields that are empty in older code.
            if item is None or item == [] or name in _SILENT:
                continue
            if name == "annotation" and isinstance(value, ast.arg):
                continue
            parts.append(name)
            if isinstance(value, ast.JoinedStr):
                # Python 3.12 appends an empty constant to some format specifications.
                item = [part for part in item if not (isinstance(part, ast.Constant) and part.value == "")]
            if rename and isinstance(item, str):
                item = _renamed(value, name, item, rename)
            _dump(item, parts, rename)
        parts.append("/")
    elif isinstance(value, list):
        for item in value:
            if not _is_bare_string(item):
                _dump(item, parts, rename)
    else:
        parts.append(repr(value))


def _is_bare_string(node: object) -> bool:
    """Docstrings, and the strings that document attributes."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _renamed(node: ast.AST, field: str, text: str, rename: tuple[str, str]) -> str:
    is_module = (isinstance(node, ast.ImportFrom) and field == "module" and not node.level) or (
        isinstance(node, ast.alias) and field == "name"
    )
    if not is_module and not (isinstance(node, ast.Name) and field == "id"):
        return text
    head, dot, rest = text.partition(".")
    return f"{rename[1]}{dot}{rest}" if head == rename[0] else text
