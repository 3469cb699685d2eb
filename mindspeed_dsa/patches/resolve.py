"""Static name resolution: follows a target through re-exports, aliases, classes and their bases."""

from __future__ import annotations

import ast
import builtins
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field

from mindspeed_dsa.patches.source_tree import (
    Definition,
    Imported,
    ModuleSource,
    Scope,
    SourceTree,
    Value,
    scope_of,
)


@dataclass(frozen=True)
class Found:
    """Candidate for a name: a definition, an assigned value, or a whole module."""

    module: ModuleSource
    qualname: str
    node: ast.AST | None
    line: int = 0

    @property
    def package(self) -> str:
        """Top-level package that contains the definition."""
        return self.module.package

    @property
    def is_definition(self) -> bool:
        """Return whether the candidate is a function or a class rather than a value or a module."""
        return isinstance(self.node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda))


@dataclass
class Resolution:
    """Result of a lookup: all candidates, or else the reason in ``missing`` or ``unknown``."""

    found: list[Found] = field(default_factory=list)
    missing: str = ""
    unknown: str = ""

    def merge(self, other: Resolution) -> None:
        """Add the candidates of ``other``, the resolution of an alternative binding of the same name."""
        self.found += [item for item in other.found if item not in self.found]
        self.missing = self.missing or other.missing
        self.unknown = self.unknown or other.unknown

    def settled(self) -> Resolution:
        """Drop placeholders such as ``except ImportError: X = None`` if there is a definition."""
        definitions = [item for item in self.found if item.is_definition]
        return Resolution(definitions or self.found) if self.found else self


class Resolver:
    """Resolves dotted paths in the modules of one source tree."""

    def __init__(self, tree: SourceTree) -> None:
        self._tree = tree
        self._class_scopes: dict[int, Scope] = {}

    def resolve(self, module: str, path: Sequence[str]) -> Resolution:
        """Resolve ``module:a.b`` without importing anything."""
        source = self._tree.module(module)
        if source is None:
            return Resolution(missing=f"there is no module {module} in {self._tree.label}")
        return self._walk(Resolution([Found(source, "", None)]), path, set())

    def _walk(self, start: Resolution, path: Sequence[str], seen: set[tuple[str, str]]) -> Resolution:
        current = start
        for name in path:
            following = Resolution(unknown=current.unknown)
            for item in current.found:
                following.merge(self._attribute(item, name, seen))
            if not following.found:
                return Resolution([], following.missing or current.missing, following.unknown)
            current = following.settled()
        return current

    def _attribute(self, item: Found, name: str, seen: set[tuple[str, str]]) -> Resolution:
        if item.node is None:
            return self._module_attribute(item.module, name, seen)
        if isinstance(item.node, ast.ClassDef):
            return self._class_attribute(item, name, seen)
        return Resolution(unknown=f"{item.qualname} of {item.module.name} is computed when it is imported")

    # -- modules -------------------------------------------------------------------------------

    def _module_attribute(self, module: ModuleSource, name: str, seen: set[tuple[str, str]]) -> Resolution:
        submodule = self._tree.module(f"{module.name}.{name}") if module.is_package else None
        inner = Resolution([Found(submodule, "", None)]) if submodule is not None else None
        if (module.name, name) in seen:  # `from package import submodule` inside that package
            return inner or Resolution(missing=f"{module.name} imports {name} in a circle")
        # A new set per path: alternatives may visit the same name.
        seen = seen | {(module.name, name)}
        scope = module.scope
        if scope is None:
            return Resolution(unknown=module.unreadable)
        result = Resolution()
        for binding in scope.names.get(name, ()):
            result.merge(self._binding(module, "", name, binding, seen))
        if result.found or name in scope.names:
            return result.settled()
        if inner is not None:
            return inner
        for star in scope.stars:
            source = self._tree.module(_absolute(module, star))
            if source is not None:
                result.merge(self._module_attribute(source, name, seen))
        if result.found:
            return result
        if "__getattr__" in scope.names:
            return Resolution(unknown=f"{module.name} creates its attributes in __getattr__")
        return Resolution(missing=f"{module.name} has no {name}{_hint(name, scope)}", unknown=result.unknown)

    def _binding(
        self,
        module: ModuleSource,
        prefix: str,
        name: str,
        binding: Definition | Value | Imported,
        seen: set[tuple[str, str]],
    ) -> Resolution:
        qualname = f"{prefix}{name}"
        if isinstance(binding, Definition):
            return Resolution([Found(module, qualname, binding.node, binding.node.lineno)])
        if isinstance(binding, Imported):
            return self._import(module, binding, seen)
        if isinstance(binding.node, (ast.Name, ast.Attribute)):
            alias = self._expression(module, binding.node, seen)
            # `fuse = torch.compile` is this package's own choice. Following the alias would let another
            # package's release change this record.
            if alias.found and alias.found[0].package == module.package:
                return alias
        return Resolution([Found(module, qualname, binding.node, binding.line)])

    def _import(self, module: ModuleSource, imported: Imported, seen: set[tuple[str, str]]) -> Resolution:
        source = self._tree.module(_absolute(module, imported))
        if source is None:
            return Resolution(unknown=f"{_absolute(module, imported)} is not in {self._tree.label}")
        if not imported.name:
            return Resolution([Found(source, "", None)])
        return self._module_attribute(source, imported.name, seen)

    def _expression(self, module: ModuleSource, node: ast.expr, seen: set[tuple[str, str]]) -> Resolution:
        """Resolve a dotted name as it is visible at the module's top level."""
        if isinstance(node, ast.Subscript):  # Generic[T]
            return self._expression(module, node.value, seen)
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return Resolution(unknown=f"{ast.unparse(node)} is computed when {module.name} is imported")
        start = self._module_attribute(module, node.id, seen)
        # For `torch.nn.Module`, step through submodules without reading the packages' __init__ files.
        while names and start.found and start.found[0].node is None:
            submodule = self._tree.module(f"{start.found[0].module.name}.{names[0]}")
            if submodule is None:
                break
            start = Resolution([Found(submodule, "", None)])
            names.pop(0)
        return self._walk(start, names, seen)

    # -- classes -------------------------------------------------------------------------------

    def class_scope(self, node: ast.ClassDef) -> Scope:
        """Return the names that the class body binds."""
        if id(node) not in self._class_scopes:
            self._class_scopes[id(node)] = scope_of(node.body)
        return self._class_scopes[id(node)]

    def bases(self, item: Found) -> list[tuple[ast.expr, Resolution]]:
        """Return each base expression of a class with its resolution."""
        assert isinstance(item.node, ast.ClassDef)
        return [(base, self._expression(item.module, base, set())) for base in item.node.bases]

    def _class_attribute(self, item: Found, name: str, seen: set[tuple[str, str]]) -> Resolution:
        assert isinstance(item.node, ast.ClassDef)
        scope = self.class_scope(item.node)
        result = Resolution()
        for binding in scope.names.get(name, ()):
            result.merge(self._class_binding(item, name, binding, seen))
        if result.found:
            return result.settled()
        # The decorator generates both, so the class itself is the definition.
        if name in ("__init__", "__dataclass_fields__") and _is_dataclass(item.node):
            return Resolution([item])
        result.missing = f"class {item.qualname} of {item.module.name} has no {name}{_hint(name, scope)}"
        for base, resolution in self.bases(item):
            for parent in resolution.settled().found:
                if isinstance(parent.node, ast.ClassDef) and parent.node is not item.node:
                    inherited = self._class_attribute(parent, name, seen)
                    if inherited.found:
                        return inherited
                    result.unknown = result.unknown or inherited.unknown
            is_class = any(isinstance(parent.node, ast.ClassDef) for parent in resolution.found)
            if not is_class and not _adds_nothing(base, name):
                result.unknown = result.unknown or (
                    f"{name} may come from {ast.unparse(base)}, whose source is not available"
                )
        if hasattr(object, name):
            result.unknown = result.unknown or f"{item.qualname} inherits {name} from object"
        return result

    def _class_binding(
        self, item: Found, name: str, binding: Definition | Value | Imported, seen: set[tuple[str, str]]
    ) -> Resolution:
        if isinstance(binding, Value) and isinstance(binding.node, ast.Name) and binding.node.id != name:
            # `forward = other_method`; if the class has no such name, it is a name of the module
            assert isinstance(item.node, ast.ClassDef)
            if binding.node.id in self.class_scope(item.node).names:
                return self._class_attribute(item, binding.node.id, seen)
        return self._binding(item.module, f"{item.qualname}.", name, binding, seen)


def _absolute(module: ModuleSource, imported: Imported) -> str:
    if not imported.level:
        return imported.module
    # `from .c import x`: in the package a.b it means a.b.c, in the module a.b.d also a.b.c. So a module
    # drops one name more than a package.
    drop = imported.level - (1 if module.is_package else 0)
    package = module.name.rsplit(".", drop)[0] if drop else module.name
    return f"{package}.{imported.module}" if imported.module else package


def _adds_nothing(base: ast.expr, name: str) -> bool:
    """Return whether a base class without source (builtin, typing marker) is known to lack the attribute."""
    marker = base.value if isinstance(base, ast.Subscript) else base
    if ast.unparse(marker).rpartition(".")[2] in ("Generic", "Protocol"):
        return True
    builtin = getattr(builtins, base.id, None) if isinstance(base, ast.Name) else None
    return isinstance(builtin, type) and not hasattr(builtin, name)


def _is_dataclass(node: ast.ClassDef) -> bool:
    names = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    return any(ast.unparse(name).rpartition(".")[2].endswith("dataclass") for name in names)


def _hint(name: str, scope: Scope) -> str:
    close = difflib.get_close_matches(name, scope.names, n=1, cutoff=0.8)
    return f" (is it {close[0]} now?)" if close else ""
