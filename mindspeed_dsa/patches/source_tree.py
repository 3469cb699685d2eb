"""Source files of packages, located and parsed without importing them, and the names that they define."""

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
    """``def`` or ``class`` statement."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Value:
    """Assignment. ``node`` is the right-hand side, or the whole statement for ``a, b = ...``."""

    node: ast.AST
    line: int


@dataclass(frozen=True)
class Imported:
    """``from module import name``, or ``import module`` if ``name`` is empty.

    ``level`` is the number of leading dots of a relative import.
    """

    module: str
    name: str
    level: int = 0


Binding = Definition | Value | Imported


@dataclass
class Scope:
    """Names bound in one module or class body, in order.

    Several bindings of a name are alternatives (``if``/``else``, ``try``/``except``). Which of them is live
    cannot be known without running the module.
    """

    names: dict[str, list[Binding]] = field(default_factory=dict)
    stars: list[Imported] = field(default_factory=list)

    def bind(self, name: str, binding: Binding, conditional: bool) -> None:
        """Add a binding of a name. An unconditional binding replaces the earlier ones."""
        earlier = self.names.get(name, [])
        if earlier and isinstance(binding, Value) and _mentions(binding.node, name):
            return  # ``f = decorate(f)``: keep the definition of f
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
            # if, try, for, while, match: the block may not run.
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
    """Yield the blocks of a compound statement (``if``, ``try``, ...) that run only conditionally."""
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
    """Return the names that a source text binds at top level, or ``None`` if this Python cannot parse it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the code is foreign: ignore its invalid escape sequences
            return scope_of(ast.parse(text).body)
    except (SyntaxError, ValueError):
        return None


@dataclass(frozen=True)
class ModuleSource:
    """Source text of one module, parsed once on first access.

    ``text`` is ``None`` for a module without readable source, for example a compiled one.
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
        """Return the names that the module's top level binds, or ``None`` (see :attr:`unreadable`)."""
        return None if self.text is None else scope_of_text(self.text)

    @property
    def unreadable(self) -> str:
        """Reason why the source cannot be read, empty if it can."""
        if self.text is None:
            return f"{self.name} has no Python source ({self.file})"
        if self.scope is None:
            running = "{}.{}".format(*sys.version_info)
            return f"{self.file} cannot be parsed by Python {running}; it may be written for a later one"
        return ""


class SourceTree:
    """Finds modules by name in some folders, or among the installed packages.

    Python's own finders resolve packages (regular packages, namespace packages spread over several folders,
    editable installs). No module, not even a parent package, is executed.

    Args:
        folders: search path like ``sys.path``; ``None`` means the interpreter's own path.
        fallback: tree for top-level packages that are not in ``folders``.
        label: name of this tree in messages.
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
        self._unpacked: object = None  # temporary folder, deleted with this object
        self._display = ("", "")

    @classmethod
    def folder(cls, path: str | Path) -> SourceTree:
        """Return a tree over a checkout or ``site-packages`` folder that contains the top-level package."""
        return cls([str(path)], fallback=cls())

    @classmethod
    def archive(cls, file: str | Path | IO[bytes], label: str = "") -> SourceTree:
        """Return a tree over a wheel, or another zip file with packages at its top level.

        Its Python files are unpacked into a temporary folder, which is deleted with the tree.

        Raises:
            zipfile.BadZipFile: the file is not a zip file.
        """
        # Imported here because both are slow to import, and the engine itself reads only installed sources.
        import tempfile
        import zipfile

        unpacked = tempfile.TemporaryDirectory(prefix="mindspeed_dsa-sources-")
        with zipfile.ZipFile(file) as archive:
            archive.extractall(unpacked.name, [n for n in archive.namelist() if n.endswith(".py")])
        tree = cls([unpacked.name], fallback=cls(), label=label or Path(str(file)).name)
        tree._unpacked = unpacked
        tree._display = (unpacked.name, tree.label)
        return tree

    def holds(self, name: str) -> bool:
        """Return whether the module is in this tree itself, ignoring the fallback."""
        return self._spec(name) is not None

    def module(self, name: str) -> ModuleSource | None:
        """Return the module's source, or ``None`` if there is no such module."""
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
            # A namespace package has no file and binds no names; a compiled module has unknown names.
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
                # For a namespace package inside another one, the finder looks its parent up in sys.modules,
                # where it is not. _namespace() below finds it.
                continue
            if spec is not None:
                if spec.submodule_search_locations is not None:
                    # Copy: a namespace package's list recomputes itself from sys.path when another tree is
                    # built.
                    spec.submodule_search_locations = list(spec.submodule_search_locations)
                return _with_file(spec)
        return _namespace(name, [os.path.join(folder, tail) for folder in path or ()])


def _finders() -> list[Any]:
    """Return ``sys.meta_path`` without wrapt's finder, which imports parent packages on lookup."""
    return [
        finder
        for finder in sys.meta_path
        if hasattr(finder, "find_spec") and not type(finder).__module__.startswith("wrapt")
    ]


def _with_file(spec: ModuleSpec) -> ModuleSpec:
    """Add the source file to the spec of a module that Python 3.11+ has frozen into the interpreter."""
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
