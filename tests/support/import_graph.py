"""References between the modules of a package, read from their sources.

Imports anywhere in a module count (in functions and ``TYPE_CHECKING`` blocks, too), and strings that name a
module, for example implementations of patches.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.support.sources import nodes_of, tree_of


class Reference(NamedTuple):
    """``importer`` names ``imported``; as a ``string``, of which only the beginning is known if ``open``."""

    importer: str
    imported: str
    line: int
    string: bool = False
    open: bool = False

    def __str__(self):
        return f"{self.importer}:{self.line} -> {self.imported}"


def _parts(name: str) -> list[str]:
    return name.split(".")


class Sources:
    """Modules of a package below a folder, and their references to each other."""

    def __init__(self, folder: Path, package: str) -> None:
        self.package = package
        self.files = {self._name(file, folder): file for file in sorted(folder.rglob("*.py"))}
        self.folders = {
            ".".join(parts[:n]) for parts in map(_parts, self.files) for n in range(1, len(parts))
        }
        self.trees = {name: tree_of(file) for name, file in self.files.items()}
        self.references = [found for name in self.files for found in self._references_of(name)]

    def _name(self, file: Path, folder: Path) -> str:
        parts = file.relative_to(folder).with_suffix("").parts
        return ".".join([self.package, *(parts[:-1] if parts[-1] == "__init__" else parts)])

    def resolve(self, dotted: str) -> str:
        """Return the module or folder that is, or contains, a dotted name; empty if it is not ours."""
        while dotted and dotted not in self.files and dotted not in self.folders:
            dotted = dotted.rpartition(".")[0]
        return dotted

    def room(self, module: str) -> str:
        return module.removeprefix(self.package).lstrip(".").partition(".")[0]

    def _references_of(self, name: str) -> Iterator[Reference]:
        tree = self.trees[name]
        constants = self._constants(name, tree)
        parts = set()  # parts of an f-string, which is read as a whole
        for node in nodes_of(self.files[name]):
            if isinstance(node, ast.Import):
                yield from self._imported(name, node, [alias.name for alias in node.names])
            elif isinstance(node, ast.ImportFrom):
                base = self._base(name, node)
                yield from self._imported(name, node, [f"{base}.{alias.name}" for alias in node.names])
            elif isinstance(node, ast.JoinedStr):
                parts.update(map(id, node.values))
            if isinstance(node, (ast.Constant, ast.JoinedStr)) and id(node) not in parts:
                text, whole = fold(node, constants)
                if re.fullmatch(
                    rf"{self.package}(\.\w+)+(:[\w.]*)?" if whole else rf"{self.package}\..*", text
                ):
                    dotted = text.partition(":")[0]
                    found = self.resolve(dotted.rstrip("."))
                    if found != self.package:  # otherwise a file's or a logger's name
                        yield Reference(name, found, node.lineno, True, not whole and ":" not in text)

    def _constants(self, name: str, tree: ast.Module) -> dict[str, str]:
        package = name if self.files[name].name == "__init__.py" else name.rpartition(".")[0]
        constants = {"__name__": name, "__package__": package}
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                text, whole = fold(node.value, constants)
                if whole and text:
                    constants[node.targets[0].id] = text
        return constants

    def _imported(self, name: str, node: ast.stmt, dotted: list[str]) -> Iterator[Reference]:
        for each in dotted:
            found = self.resolve(each)
            if found:
                yield Reference(name, found, node.lineno)

    def _base(self, name: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        up = node.level - (self.files[name].name == "__init__.py")
        parts = name.split(".")
        return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])


def fold(node: ast.AST, constants: Mapping[str, str]) -> tuple[str, bool]:
    """Return the text of a string, or its beginning if the rest is only known at run time."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value, True
    if not isinstance(node, ast.JoinedStr):
        return "", False
    text = ""
    for part in node.values:
        if isinstance(part, ast.FormattedValue):
            if not (isinstance(part.value, ast.Name) and part.value.id in constants):
                return text, False
            text += constants[part.value.id]
        else:
            text += str(part.value)
    return text, True


def upward(sources: Sources, level: Mapping[str, int]) -> list[str]:
    """Return references from a room to a higher one, or to another one of the same height.

    Args:
        sources: package's sources.
        level: height of each room.
    """
    problems = []
    for reference in sources.references:
        here, there = sources.room(reference.importer), sources.room(reference.imported)
        if here != there and not level.get(there, 99) < level.get(here, -1):
            problems.append(str(reference))
    return problems


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Return strongly connected components of more than one module (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for after in sorted(edges.get(node, ())):
            if after not in index:
                visit(after)
                low[node] = min(low[node], low[after])
            elif after in stack:
                low[node] = min(low[node], index[after])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                groups.append(sorted(component))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return groups
