"""Names that a block of source binds, conditional and repeated definitions included."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


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
