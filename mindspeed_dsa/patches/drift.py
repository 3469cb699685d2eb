"""Patch checks against source code, before anything is imported or modified.

For each patch: does the target exist, does it take the parameters that the implementation relies on, and is
its code unchanged since the feature was written?
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.resolve import Found, Resolver
from mindspeed_dsa.patches.source_tree import SourceTree
from mindspeed_dsa.patches.spec import Patch

KnownSources = Mapping[str, dict[str, str]]
"""Mapping from target label (with the original root package) to ``{release: fingerprint}``, oldest first."""

LOST = "your change would be lost"
"""Part of the message about a function that a fork changed and that a patch does not call."""
_CHANGED, _UNKNOWN = "your fork changed this", "no known release has this"
State = Literal["ok", "changed", "missing", "parameter", "out-of-range", "unknown"]
FATAL: frozenset[State] = frozenset({"missing", "parameter"})
"""States in which a required patch cannot be applied."""


def is_change(note: str) -> bool:
    """Return whether a note in a site's report says that the fork has changed the target."""
    return note.startswith((_CHANGED, _UNKNOWN))


@dataclass(frozen=True)
class TargetFacts:
    """Properties of one patch target, as found in source code.

    Attributes:
        exists: whether the target exists; ``None`` if the source cannot tell (inherited from code that is not
            available, or computed at import).
        reason: explanation why it does not exist, or why that is unknown.
        params: parameter names (for a class, of its constructor), merged over alternative definitions.
            ``None`` if unknown, or if another package defines the target.
        has_var_keyword: whether it takes ``**kwargs``.
        fingerprint: hash over all alternative definitions, see :func:`fingerprint`; empty if another package
            defines the target.
        file, line: location of the definition.
        defined_in: ``"module:qualname"`` of the definition, after following re-exports and base classes.
    """

    exists: bool | None
    reason: str = ""
    params: tuple[str, ...] | None = None
    has_var_keyword: bool = False
    fingerprint: str = ""
    file: str = ""
    line: int = 0
    defined_in: str = ""


@dataclass(frozen=True)
class Finding:
    """Result of one check of one patch; ``fatal`` if a required patch cannot be applied."""

    state: State
    message: str

    @property
    def fatal(self) -> bool:
        """Return whether the finding means that the patch cannot be applied."""
        return self.state in FATAL


def assess(patch: Patch, facts: TargetFacts) -> list[Finding]:
    """Check that the target exists and takes the parameters that the implementation relies on."""
    if facts.exists is None:
        return [Finding("unknown", f"{patch.label} cannot be judged from source: {facts.reason}")]
    if not facts.exists:
        return [Finding("missing", f"{patch.label} does not exist: {facts.reason}")]
    if facts.params is None or facts.has_var_keyword:
        return []
    missing = [name for name in patch.params if name not in facts.params]
    if not missing:
        return []
    text = f"{patch.label} has no parameter {', '.join(missing)}"
    if facts.file:  # facts from a record lack a file; it lists only the parameters that patches need
        text += f": it takes ({', '.join(facts.params)}) at {facts.file}:{facts.line}"
    return [Finding("parameter", text)]


@dataclass
class Checker:
    """Checks patches against one source tree.

    Attributes:
        tree: source tree.
        version: release of the target package, if known.
        known: fingerprints of the targets in known releases.
        root: package that replaces ``original_root`` in this tree.
        original_root: package name in targets and records.
    """

    tree: SourceTree
    version: str | None = None
    known: KnownSources = field(default_factory=dict)
    root: str = "megatron"
    original_root: str = "megatron"

    def __post_init__(self) -> None:
        self._resolver = Resolver(self.tree)

    def inspect(self, patch: Patch) -> TargetFacts:
        """Return the facts about the patch's target (for an entry: about the dictionary)."""
        path = patch.path
        in_namespace = patch.kind == "entry" and path[-1] == "__dict__"
        if in_namespace:  # an entry of a module's own __dict__ is a module-level name
            path = (*path[:-1], str(patch.key))
        result = self._resolver.resolve(patch.module, path)
        if not result.found:
            return TargetFacts(None if result.unknown else False, result.unknown or result.missing)
        first = result.found[0]
        defined_in = f"{first.module.name}:{first.qualname}"
        if first.package != self._package(patch):  # defined elsewhere: another package's release changes it
            return TargetFacts(True, file=first.module.file, line=first.line, defined_in=defined_in)
        params: list[str] | None = []
        has_var_keyword = False
        for item in result.found:
            names, takes_any = self._parameters(item)
            has_var_keyword |= takes_any
            # If one alternative's parameters are unknown, so is the union.
            params = None if params is None or names is None else [*params, *names]
        nodes = [item.node for item in result.found if item.node is not None]
        if patch.kind == "entry" and not in_namespace:
            nodes = [value for node in nodes for value in _entry(node, patch.key)]
        return TargetFacts(
            exists=True,
            params=None if params is None else tuple(dict.fromkeys(params)),
            has_var_keyword=has_var_keyword,
            fingerprint=fingerprint(nodes, (self.root, self.original_root)) if nodes else "",
            file=first.module.file,
            line=first.line,
            defined_in=defined_in,
        )

    def check(self, patch: Patch) -> list[Finding]:
        """Return all findings about the patch, an empty list if there are none."""
        reason = versions.outside(patch, self._version_of)
        if reason:
            return [Finding("out-of-range", reason)]
        facts = self.inspect(patch)
        return [*assess(patch, facts), *self._changed(patch, facts)]

    def without_target(self, patch: Patch) -> list[str]:
        """Return messages if the target is missing or lacks parameters, although its package exists."""
        # Wheels up to 0.16 do not contain megatron.training; patches of it are skipped there.
        # `megatron.training` for megatron.training.arguments: some wheels lack the whole subpackage.
        package = ".".join(patch.module.split(".")[:2])
        if self._package(patch) != self.root or not self.tree.holds(package):
            return []
        return [finding.message for finding in self.check(patch) if finding.fatal]

    def __call__(self, patch: Patch) -> tuple[list[str], list[str]]:
        """Return ``(problems, notes)``, the form that the patch manager expects.

        Only the root package is checked. Others, like torch, define names at import that no source shows.
        """
        if self._package(patch) != self.root:
            return [], []
        findings = self.check(patch)
        problems = [finding.message for finding in findings if finding.fatal]
        return problems, [finding.message for finding in findings if finding.state == "changed"]

    def _changed(self, patch: Patch, facts: TargetFacts) -> list[Finding]:
        releases = self.known.get(self._original_label(patch), {})
        if not facts.fingerprint or not releases:
            return []
        release = _recorded(self.version, releases)
        # A version without a record may have the code of any recorded release.
        known = [releases[release]] if release else list(releases.values())
        if facts.fingerprint in known:
            return []
        consequence = {
            "replace": f"this feature replaces it and {LOST}",
            "wrap": "this feature wraps it; check that its wrapper still fits",
        }.get(patch.kind, "this feature replaces it by another object")
        if patch.in_place_of:
            consequence = f"this feature does not call it for {patch.in_place_of}, where {LOST}"
        thing = "function" if patch.kind in ("replace", "wrap") else "definition"
        place = f"{patch.label} at {facts.file}:{facts.line}"
        if release:
            text = f"{_CHANGED} {thing}; {consequence}: {place} is not that of {release}"
        else:
            span = " to ".join(dict.fromkeys((next(iter(releases)), next(reversed(releases)))))
            text = f"{_UNKNOWN} {thing}; {consequence}: {place} differs from {span}"
        return [Finding("changed", text)]

    def _version_of(self, package: str) -> str | None:
        return self.version if package == self.root else None

    @staticmethod
    def _package(patch: Patch) -> str:
        return patch.module.partition(".")[0]

    def _original_label(self, patch: Patch) -> str:
        text = patch.label
        if text.split(".")[0].split(":")[0] == self.root:
            return self.original_root + text[len(self.root) :]
        return text

    # -- parameters ----------------------------------------------------------------------------

    def _parameters(self, item: Found) -> tuple[list[str] | None, bool]:
        node = item.node
        if isinstance(node, ast.ClassDef):
            return self._constructor(item)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return None, False
        arguments = node.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        return names, arguments.kwarg is not None

    def _constructor(self, item: Found) -> tuple[list[str] | None, bool]:
        result = self._resolver.resolve(item.module.name, (*item.qualname.split("."), "__init__"))
        if not result.found:
            return None, False
        constructor = result.found[0]
        if constructor.package != item.package:
            return None, False
        if isinstance(constructor.node, ast.ClassDef):
            return ["self", *self._fields(constructor)], False
        return self._parameters(constructor)

    def _fields(self, item: Found) -> list[str]:
        """Return the fields of a dataclass, inherited ones first."""
        assert isinstance(item.node, ast.ClassDef)
        names: list[str] = []
        for _, resolution in self._resolver.bases(item):
            for base in resolution.found[:1]:
                if isinstance(base.node, ast.ClassDef):
                    names += self._fields(base)
        names += [
            statement.target.id
            for statement in item.node.body
            if isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and "ClassVar" not in ast.unparse(statement.annotation)
        ]
        return names


def _entry(node: ast.AST, key: object) -> list[ast.AST]:
    """Return the expression stored under a constant key of a dictionary literal."""
    if not isinstance(node, ast.Dict):
        return []
    items = zip(node.keys, node.values, strict=True)
    return [value for name, value in items if isinstance(name, ast.Constant) and name.value == key]


def _recorded(version: str | None, releases: Mapping[str, str]) -> str | None:
    """Return the recorded release equal to a version, ignoring local labels and spelling."""
    if version is None:
        return None
    from packaging.version import InvalidVersion, Version  # slow to import, needed for drift only

    try:
        public = Version(Version(version).public)
        return next((release for release in releases if Version(release) == public), None)
    except InvalidVersion:
        return None


# -- fingerprints ------------------------------------------------------------------------------

LENGTH = 16

# ctx follows from the position, kind and type_comment are spelling, returns (annotations) have no effect.
_SILENT = {"ctx", "kind", "type_comment", "type_ignores", "returns"}


def fingerprint(nodes: Iterable[ast.AST], rename: tuple[str, str] | None = None) -> str:
    """Hash the syntax trees in order. The hash changes if and only if the code changes.

    Comments, docstrings, blank lines, indentation, line breaks, quotes, redundant parentheses and annotations
    of parameters and results do not change it. Syntax trees are used rather than tokens, because tokenization
    differs between Python versions (f-strings since 3.12).

    Args:
        nodes: definitions or expressions.
        rename: ``(name, stands_for)`` of a top-level package: in a fork with another root package, code that
            names its own package gets the original's fingerprint.
    """
    parts: list[str] = []
    for node in nodes:
        _dump(node, parts, rename)
    return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()[:LENGTH]


def _dump(value: object, parts: list[str], rename: tuple[str, str] | None) -> None:
    if isinstance(value, ast.AST):
        parts.append(type(value).__name__)
        for name, item in ast.iter_fields(value):
            # Omit empty fields: later Python versions add fields that are empty for older code.
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
    """Return whether a node is a docstring or a string that documents an attribute."""
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
