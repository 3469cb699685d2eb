"""Who may import whom, and the one shape that features have.

Read from the sources: imports anywhere in a module (functions and ``TYPE_CHECKING`` blocks included) and
strings that name a module, such as the implementations of patches.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

import mindspeed_dsa
from mindspeed_dsa.catalogue import shipped
from mindspeed_dsa.features import KINDS, built_in

PACKAGE = "mindspeed_dsa"
FOLDER = Path(mindspeed_dsa.__file__).parent

ORDER = (
    {"versions", "log"},
    {"patches"},
    {"context"},
    {"declarations"},
    {"settings"},
    {"platforms"},
    {"ops"},
    {"parallel", "runs", "schedule"},
    {"integration"},
    {"features"},
    {"catalogue"},
    {"compat"},
    {"checks", "start_report"},
    {"session"},
    {"compare"},
    {"cli", "megatron_adaptor"},
    {"", "__main__"},
)
"""Rooms, lowest first: a module imports its own room and lower ones. ``""`` is the package's public face."""
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
HEAVY = {"torch", "megatron", "torch_npu", "triton", "transformer_engine"}
DECLARING = ("feature.py", "options.py", "validation.py")


class Reference(NamedTuple):
    """``importer`` names ``imported``: in a ``string``, of which only the beginning is known if ``open``."""

    importer: str
    imported: str
    line: int
    string: bool = False
    open: bool = False

    def __str__(self):
        return f"{self.importer}:{self.line} -> {self.imported}"


class Sources:
    """The modules of a package below a folder, and what they name of each other."""

    def __init__(self, folder: Path, package: str) -> None:
        self.package = package
        self.files = {self._name(file, folder): file for file in sorted(folder.rglob("*.py"))}
        self.trees = {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in self.files.items()}
        self.references = [found for name in self.files for found in self._references_of(name)]

    def _name(self, file: Path, folder: Path) -> str:
        parts = file.relative_to(folder).with_suffix("").parts
        return ".".join([self.package, *(parts[:-1] if parts[-1] == "__init__" else parts)])

    def resolve(self, dotted: str) -> str:
        """The module that is, or holds, what the dotted name stands for; empty if that is not ours."""
        while dotted and dotted not in self.files:
            dotted = dotted.rpartition(".")[0]
        return dotted

    def room(self, module: str) -> str:
        return module.removeprefix(self.package).lstrip(".").partition(".")[0]

    def _references_of(self, name: str) -> Iterator[Reference]:
        tree = self.trees[name]
        constants = self._constants(name, tree)
        parts = set()  # of an f-string: they are read as a whole
        for node in ast.walk(tree):
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
                    if found != self.package:  # a file's name, a logger's
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
    """The text of a string, or its beginning where the rest is only known when it runs."""
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


def upward(sources: Sources) -> list[str]:
    """References from a room to a higher one, or to another one of the same height."""
    found = []
    for reference in sources.references:
        here, there = sources.room(reference.importer), sources.room(reference.imported)
        if here != there and not LEVEL.get(there, 99) < LEVEL.get(here, -1):
            found.append(str(reference))
    return found


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

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
                found.append(sorted(component))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


SOURCES = Sources(FOLDER, PACKAGE)
FEATURE_FILES = sorted((FOLDER / "features").rglob("feature.py"))
FEATURES = f"{PACKAGE}.features"


def kind_of(module: str) -> str:
    """``memory`` for modules of that kind, empty for the registry and everything outside of ``features``."""
    below = module.removeprefix(f"{FEATURES}.")
    kind = below.partition(".")[0]
    return kind if below != module and (FOLDER / "features" / kind).is_dir() else ""


def listed(wrong: list[str]) -> str:
    """Every violation, where pytest would leave some out."""
    return "\n".join(["", *sorted(set(wrong))])


def name_of(file: Path) -> str:
    return ".".join([PACKAGE, *file.relative_to(FOLDER).with_suffix("").parts])


# -- rooms -------------------------------------------------------------------------------------


def test_every_module_has_a_room():
    homeless = sorted({name for name in SOURCES.files if SOURCES.room(name) not in LEVEL})
    assert not homeless, f"say in ORDER what {homeless} may import, and in CONTRIBUTING.md what they hold"


def test_nobody_imports_upward():
    wrong = upward(SOURCES)
    assert not wrong, listed(wrong)


def test_patches_are_implemented_below_their_feature():
    """As the rows name it when they run, however the string was made."""
    wrong = []
    for feature in shipped():
        for named in (*(patch.impl for patch in feature.patches), feature.on_finalize):
            module = named.partition(":")[0]
            if module.startswith(f"{PACKAGE}."):
                if module not in SOURCES.files:
                    wrong.append(f"{feature.name}: there is no module {module}")
                elif LEVEL[SOURCES.room(module)] > LEVEL["features"]:
                    wrong.append(f"{feature.name}: {module} is above the features")
    assert not wrong, listed(wrong)


def test_kinds_of_features_import_neither_each_other_nor_the_registry():
    wrong = []
    for reference in SOURCES.references:
        here, there = kind_of(reference.importer), kind_of(reference.imported)
        if here and SOURCES.room(reference.imported) == "features" and there != here:
            wrong.append(str(reference))
    for file in FEATURE_FILES:
        kind = kind_of(name_of(file))
        for feature in declared(file):
            for named in (*(patch.impl for patch in feature.patches), feature.on_finalize):
                if kind_of(named.partition(":")[0]) not in ("", kind):
                    wrong.append(f"{feature.name}: {named}")
    assert not wrong, listed(wrong)


def test_no_modules_import_each_other_in_a_circle():
    edges: dict[str, set[str]] = {name: set() for name in SOURCES.files}
    for reference in SOURCES.references:
        if not reference.open:
            edges[reference.importer].add(reference.imported)
    for file in FEATURE_FILES:
        edges[FEATURES].add(name_of(file))  # the registry looks for them in folders
        for feature in declared(file):
            named = {patch.impl.partition(":")[0] for patch in feature.patches}
            edges[name_of(file)] |= {module for module in named if module in SOURCES.files}
    for name, imported in edges.items():
        imported.discard(name)
    wrong = [" -> ".join(circle) for circle in circles(edges)]
    assert not wrong, listed(wrong)


def test_strings_name_modules_that_exist():
    """``"mindspeed_dsa.x.y:z"`` in a string is nobody's import: a renamed module would go unnoticed."""
    gone = []
    for name, tree in SOURCES.trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                match = re.fullmatch(rf"({PACKAGE}(?:\.\w+)+):[\w.]+", node.value)
                if match and match[1] not in SOURCES.files:
                    gone.append(f"{name}:{node.lineno}: {node.value}")
    assert not gone, listed(gone)


# -- features ----------------------------------------------------------------------------------


def declared(file: Path):
    module = __import__(name_of(file), fromlist=["feature"])
    return module.FEATURES if hasattr(module, "FEATURES") else (module.FEATURE,)


def test_every_folder_of_features_is_a_kind():
    folders = {path.name for path in (FOLDER / "features").iterdir() if (path / "__init__.py").is_file()}
    assert folders == set(KINDS)


def test_the_registry_finds_every_feature():
    found = [feature.name for file in FEATURE_FILES for feature in declared(file)]
    assert sorted(found) == sorted(feature.name for feature in built_in())
    assert len(set(found)) == len(found)


def test_feature_files_hold_declarations_only():
    wrong = []
    for file in FEATURE_FILES:
        tree = SOURCES.trees[name_of(file)]
        for node in tree.body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if not docstring and not isinstance(
                node, (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
            ):
                wrong.append(f"{name_of(file)}:{node.lineno}: {type(node).__name__}")
        wrong += [f"{name_of(file)}:{n.lineno}: lambda" for n in ast.walk(tree) if isinstance(n, ast.Lambda)]
    assert not wrong, listed(wrong)


def test_options_are_frozen_and_made_by_of():
    wrong = []
    for file in FEATURE_FILES:
        home = name_of(file).rpartition(".")[0]
        for feature in declared(file):
            if feature.options is None:
                continue
            made_by = getattr(feature.options, "__self__", None)
            if feature.options.__name__ != "of" or not dataclasses.is_dataclass(made_by):
                wrong.append(f"{feature.name}: options is not the `of` of a dataclass")
            elif not made_by.__dataclass_params__.frozen or not made_by.__module__.endswith(".options"):
                wrong.append(f"{feature.name}: {made_by} is not a frozen dataclass of an options.py")
            elif kind_of(made_by.__module__) != kind_of(home):
                wrong.append(f"{feature.name}: {made_by} is of another kind")
    assert not wrong, listed(wrong)


def test_checks_are_functions_of_validation():
    default = type(built_in()[0]).__dataclass_fields__["validate"].default
    wrong = [
        f"{feature.name}: {feature.validate.__module__}.{feature.validate.__name__}"
        for feature in built_in()
        if feature.validate is not default
        and not (
            feature.validate.__module__.rpartition(".")[2] == "validation"
            and feature.validate.__name__.startswith("check_")
        )
    ]
    assert not wrong, listed(wrong)


def test_names_of_files_say_what_they_do():
    """The ways in which older names said how a file was used, not what is in it."""
    pattern = re.compile(r"(^declare|_declare|_impl|_limits)\.py$")
    wrong = [str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.py") if pattern.search(path.name)]
    assert not wrong, listed(wrong)


def test_a_folder_with_a_feature_is_a_package_of_its_own():
    wrong = [
        str(file.relative_to(FOLDER)) for file in FEATURE_FILES if not (file.parent / "__init__.py").is_file()
    ]
    wrong += [
        str(file.relative_to(FOLDER)) for file in FEATURE_FILES if kind_of(name_of(file)) == file.parent.name
    ]
    for file in FEATURE_FILES:
        package = SOURCES.trees.get(name_of(file).rpartition(".")[0])
        if package is not None and any(not isinstance(node, ast.Expr) for node in package.body):
            wrong.append(f"{file.parent.relative_to(FOLDER)}/__init__.py holds more than a docstring")
    assert not wrong, listed(wrong)


def test_declarations_import_neither_torch_nor_megatron():
    """Not themselves, and not through what they import: doctor and --help come before both."""
    wrong = []
    names = []
    for file in sorted((FOLDER / "features").rglob("*.py")):
        if file.name not in DECLARING:
            continue
        names.append(name_of(file))
        for node in ast.walk(SOURCES.trees[name_of(file)]):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            wrong += [f"{name_of(file)}: {m}" for m in modules if m.partition(".")[0] in HEAVY]
    assert not wrong, listed(wrong)
    code = (
        "import sys\nfrom importlib import import_module\n"
        f"for name in {names!r}:\n"
        "    import_module(name)\n"
        f"    assert not {HEAVY!r} & set(sys.modules), name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# -- the machinery behind these tests ----------------------------------------------------------

SMALL = {
    "__init__": "",
    "log": "",
    "patches.__init__": "",
    "patches.engine": "",
    "session": "",
    "features.__init__": "",
    "features.memory.__init__": "",
    "features.memory.swap": "",
}


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("log", "import mindspeed_dsa.session\n"),
        ("log", "from mindspeed_dsa import session\n"),
        ("log", "from mindspeed_dsa import disable\n"),
        ("log", "def f():\n    from mindspeed_dsa.session import current\n"),
        (
            "log",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from mindspeed_dsa.session import S\n",
        ),
        ("log", "from . import session\n"),
        ("patches.engine", "from ..session import current\n"),
        ("patches.__init__", "from ..features.memory import swap\n"),
        ("patches.engine", "IMPL = 'mindspeed_dsa.session:current'\n"),
        ("patches.engine", "HERE = 'mindspeed_dsa.features'\nIMPL = f'{HERE}.memory.swap:out'\n"),
        ("patches.engine", "import_module(f'mindspeed_dsa.features.{kind}')\n"),
        ("features.memory.swap", "import_module('mindspeed_dsa.session')\n"),
    ],
)
def test_an_upward_import_is_seen(tmp_path, module, text):
    for name, content in {**SMALL, module: text}.items():
        file = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    found = upward(Sources(tmp_path, PACKAGE))
    importer = f"{PACKAGE}.{module}".removesuffix(".__init__")
    assert found
    assert all(text.startswith(f"{importer}:") for text in found)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("session", "import mindspeed_dsa.log\nfrom mindspeed_dsa.features.memory import swap\n"),
        ("session", '"""The text of mindspeed_dsa.session goes to mindspeed_dsa.json."""\n'),
        ("log", "FILE = 'mindspeed_dsa.json'\nNAME = f'mindspeed_dsa.{feature}'\n"),
        ("patches.engine", "from . import engine\nfrom mindspeed_dsa import log\n"),
    ],
)
def test_other_imports_are_allowed(tmp_path, module, text):
    for name, content in {**SMALL, module: text}.items():
        file = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    assert upward(Sources(tmp_path, PACKAGE)) == []


def test_a_circle_is_found():
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a", "e"}}
    assert circles(edges) == [["b", "c"]]
