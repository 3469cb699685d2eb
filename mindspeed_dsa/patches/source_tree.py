"""Sources of packages, found and read as Python would and never imported, and the names that they bind."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import IO, Any


@dataclass(frozen=True)
class Definition:
    """``def`` or ``class``."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Value:
    """An assignment; ``node`` is its right-hand side, or the statement when several names share it."""

    node: ast.AST
    line: int


@dataclass(frozen=True)
class Imported:
    """``from module import name``, or ``import module`` where ``name`` is empty.

    ``level`` counts the leading dots of a relative import.
    """

    module: str
    name: str
    level: int = 0


Binding = Definition | Value | Imported


@dataclass
class Scope:
    """Names of one module or class body, in the order of their bindings.

    Several bindings of a name are alternatives (``if``/``else``, ``try``/``except``): which one is
    live cannot be known without running the module.
    """

    names: dict[str, list[Binding]] = field(default_factory=dict)
    stars: list[Imported] = field(default_factory=list)

    def bind(self, name: str, binding: Binding, conditional: bool) -> None:
        """Add one alternative, or, where the binding is sure to happen, drop the earlier ones."""
        earlier = self.names.get(name, [])
        if earlier and isinstance(binding, Value) and _mentions(binding.node, name):
            return  # ``f = decorate(f)``: the definition is what matters
        if isinstance(binding, Definition):
            earlier = [b for b in earlier if not (isinstance(b, Definition) and _is_overload(b.node))]
            conditional = conditional or any(_mentions(d, name) for d in binding.node.decorator_list)
        self.names[name] = [*earlier, binding] if conditional else [binding]


def scope_of(body: Sequence[ast.stmt]) -> Scope:
    """Collect the bindings of a module or class body."""
    scope = Scope()
    _collect(body, scope, conditional=False)
    return scope


def _collect(body: Sequence[ast.stmt], scope: Scope, conditional: bool) -> None:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            scope.bind(node.name, Definition(node), conditional)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                _assign(target, node, scope, conditional)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            _assign(node.target, node, scope, conditional)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                module = alias.name if alias.asname else alias.name.partition(".")[0]
                scope.bind(alias.asname or module, Imported(module, ""), conditional)
        elif isinstance(node, ast.ImportFrom):
            _import_from(node, scope, conditional)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                if isinstance(target, ast.Name) and not conditional:
                    scope.names.pop(target.id, None)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            _collect(node.body, scope, conditional)
        else:
            for block in _branches(node):
                _collect(block, scope, conditional=True)


def _assign(target: ast.expr, node: ast.Assign | ast.AnnAssign, scope: Scope, conditional: bool) -> None:
    if isinstance(target, ast.Name) and node.value is not None:
        scope.bind(target.id, Value(node.value, node.lineno), conditional)
    elif isinstance(target, (ast.Tuple, ast.List)):
        for element in ast.walk(target):
            if isinstance(element, ast.Name):
                scope.bind(element.id, Value(node, node.lineno), conditional)


def _import_from(node: ast.ImportFrom, scope: Scope, conditional: bool) -> None:
    for alias in node.names:
        imported = Imported(node.module or "", alias.name, node.level)
        if alias.name == "*":
            scope.stars.append(imported)
        else:
            scope.bind(alias.asname or alias.name, imported, conditional)


def _branches(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Blocks of a compound statement that may or may not run."""
    if isinstance(node, ast.If) and _is_type_checking(node.test):
        yield node.orelse
        return
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield part.body


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _mentions(node: ast.AST, name: str) -> bool:
    return any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node))


def _is_overload(node: ast.AST) -> bool:
    decorators = getattr(node, "decorator_list", ())
    return any(ast.unparse(decorator).endswith("overload") for decorator in decorators)


def scope_of_text(text: str) -> Scope | None:
    """Return the names that a source binds at its top level; ``None`` if this Python cannot parse it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences in that code are not our concern
            return scope_of(ast.parse(text).body)
    except (SyntaxError, ValueError):
        return None


@dataclass(frozen=True)
class ModuleSource:
    """One module's source text; parsed once, on first access.

    ``text`` is ``None`` for a module without readable source (compiled, or another kind of loader).
    """

    name: str
    file: str
    text: str | None
    is_package: bool

    @property
    def package(self) -> str:
        """Top-level package of the module."""
        return self.name.partition(".")[0]

    @cached_property
    def scope(self) -> Scope | None:
        """Return the names that the module's top level binds; ``None`` when ``unreadable`` says why."""
        return None if self.text is None else scope_of_text(self.text)

    @property
    def unreadable(self) -> str:
        """Why there is no source; empty if there is."""
        if self.text is None:
            return f"{self.name} has no Python source ({self.file})"
        if self.scope is None:
            running = "{}.{}".format(*sys.version_info)
            return f"{self.file} cannot be parsed by Python {running}; it may be written for a later one"
        return ""


class SourceTree:
    """Finds modules by name below some folders, or among installed packages.

    Packages are resolved with Python's own finders (regular packages, namespace packages spread over
    several folders, editable installs), but no module, not even a parent package, is executed.

    Args:
        folders: like ``sys.path``; ``None`` means the interpreter's own path.
        fallback: another tree for top-level packages that are not below ``folders``.
        label: how a message names this tree.
    """

    def __init__(
        self, folders: Sequence[str] | None = None, *, fallback: SourceTree | None = None, label: str = ""
    ) -> None:
        PathFinder.invalidate_caches()
        self.label = label or ("installed packages" if folders is None else ", ".join(folders))
        self._folders = None if folders is None else list(folders)
        self._fallback = fallback
        self._specs: dict[str, ModuleSpec | None] = {}
        self._modules: dict[str, ModuleSource | None] = {}
        self._unpacked: object = None  # keeps the folder alive
        self._display = ("", "")

    @classmethod
    def installed(cls) -> SourceTree:
        """Return the tree in which ``import`` searches in this interpreter."""
        return cls()

    @classmethod
    def folder(cls, path: str | Path) -> SourceTree:
        """A checkout, or a ``site-packages`` folder: the one that holds the top-level package."""
        return cls([str(path)], fallback=cls())

    @classmethod
    def archive(cls, file: str | Path | IO[bytes], label: str = "") -> SourceTree:
        """A wheel, or another zip file with packages at its top.

        Its Python files are unpacked into a temporary folder that lives as long as the tree.

        Raises:
            zipfile.BadZipFile: the file is not a zip file.
        """
        import tempfile  # both are slow to import, and the engine itself reads installed sources only
        import zipfile

        unpacked = tempfile.TemporaryDirectory(prefix="mindspeed_dsa-sources-")
        with zipfile.ZipFile(file) as archive:
            archive.extractall(unpacked.name, [n for n in archive.namelist() if n.endswith(".py")])
        tree = cls([unpacked.name], fallback=cls(), label=label or Path(str(file)).name)
        tree._unpacked = unpacked
        tree._display = (unpacked.name, tree.label)
        return tree

    def holds(self, name: str) -> bool:
        """Return whether the module is in this tree itself, ignoring its fallback."""
        return self._spec(name) is not None

    def module(self, name: str) -> ModuleSource | None:
        """The module's source, or ``None`` if there is no such module."""
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def _read(self, name: str) -> ModuleSource | None:
        if self._fallback is not None and not self.holds(name.partition(".")[0]):
            return self._fallback.module(name)
        spec = self._spec(name)
        if spec is None:
            return None
        is_package = spec.submodule_search_locations is not None
        if not spec.has_location or spec.origin is None:
            return ModuleSource(name, name, "" if is_package else None, is_package)
        text = None
        if spec.origin.endswith(".py"):
            text = importlib.util.decode_source(_content(spec))
        return ModuleSource(name, spec.origin.replace(*self._display, 1), text, is_package)

    def _spec(self, name: str) -> ModuleSpec | None:
        if name not in self._specs:
            self._specs[name] = self._find(name)
        return self._specs[name]

    def _find(self, name: str) -> ModuleSpec | None:
        parent, _, tail = name.rpartition(".")
        path = self._folders
        if parent:
            package = self._spec(parent)
            if package is None or package.submodule_search_locations is None:
                return None
            path = list(package.submodule_search_locations)
        for finder in [PathFinder] if self._folders is not None else _finders():
            try:
                spec = finder.find_spec(name, path)
            except (ImportError, KeyError, ValueError):
                # A namespace package inside another one asks sys.modules for its parent, which is not
                # there; found below.
                continue
            if spec is not None:
                if spec.submodule_search_locations is not None:
                    # That of a namespace package is made again, of sys.path, when another tree is built.
                    spec.submodule_search_locations = list(spec.submodule_search_locations)
                return _with_file(spec)
        return _namespace(name, [os.path.join(folder, tail) for folder in path or ()])


def _finders() -> list[Any]:
    """The interpreter's finders, without wrapt's, which imports parents on lookup."""
    return [
        finder
        for finder in sys.meta_path
        if hasattr(finder, "find_spec") and not type(finder).__module__.startswith("wrapt")
    ]


def _with_file(spec: ModuleSpec) -> ModuleSpec:
    """Since Python 3.11 some of the standard library is frozen into the interpreter, beside its files."""
    file = getattr(spec.loader_state, "filename", None) if spec.origin == "frozen" else None
    found = importlib.util.spec_from_file_location(spec.name, file) if file else None
    return found or spec


def _namespace(name: str, folders: list[str]) -> ModuleSpec | None:
    existing = [folder for folder in folders if os.path.isdir(folder)]
    if not existing:
        return None
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = existing
    return spec


def _content(spec: ModuleSpec) -> bytes:
    file = Path(str(spec.origin))
    if file.is_file():
        return file.read_bytes()
    data: bytes = spec.loader.get_data(str(file))  # type: ignore[union-attr]  # a zip file on sys.path
    return data
