"""Import rules between rooms, and the shape of features; `support/import_graph.py` defines imports."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mindspeed_dsa
from mindspeed_dsa.features import KINDS, built_in, declared_in, shipped
from tests.support.import_graph import circles, upward

PACKAGE = "mindspeed_dsa"
FOLDER = Path(mindspeed_dsa.__file__).parent
ROOT = FOLDER.parent

ORDER = (
    {"log"},
    {"patches"},
    {"environment"},
    {"feature"},
    {"settings"},
    {"platforms"},
    {"ops"},
    {"parallel", "runs", "schedule"},
    {"optimizers"},
    {"context_parallel"},
    {"integrations"},
    {"megatron"},
    {"features"},
    {"session"},
    {"tools"},
    {"", "__main__", "megatron_adaptor", "rl", "transformers", "weights"},
)
"""Rooms, lowest first: a module imports its own room and lower ones. ``""`` is the public package."""
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
HEAVY = {"torch", "megatron", "torch_npu", "triton", "transformer_engine"}
FEATURE_FILES = sorted((FOLDER / "features").rglob("feature.py"))
FEATURES = f"{PACKAGE}.features"


def kind_of(module: str) -> str:
    """Return the kind of a feature's module; empty for the registry and outside of ``features``."""
    below = module.removeprefix(f"{FEATURES}.")
    kind = below.partition(".")[0]
    return kind if below != module and (FOLDER / "features" / kind).is_dir() else ""


def listed(wrong: list[str]) -> str:
    """Return every violation, as pytest would shorten the list."""
    return "\n".join(["", *sorted(set(wrong))])


def name_of(file: Path) -> str:
    return ".".join([PACKAGE, *file.relative_to(FOLDER).with_suffix("").parts])


# -- rooms -------------------------------------------------------------------------------------


def test_every_module_has_a_room(sources):
    homeless = sorted({name for name in sources.files if sources.room(name) not in LEVEL})
    assert not homeless, f"say in ORDER what {homeless} may import, and in CONTRIBUTING.md what they hold"


def test_nobody_imports_upward(sources):
    wrong = upward(sources, LEVEL)
    assert not wrong, listed(wrong)


def test_patches_are_implemented_below_their_feature(sources):
    """Names are taken from the rows at run time, however the string was made."""
    wrong = []
    for feature in shipped():
        for named in (*(patch.impl for patch in feature.patches), feature.on_finalize):
            module = named.partition(":")[0]
            if module.startswith(f"{PACKAGE}."):
                if module not in sources.files:
                    wrong.append(f"{feature.name}: there is no module {module}")
                elif LEVEL[sources.room(module)] > LEVEL["features"]:
                    wrong.append(f"{feature.name}: {module} is above the features")
    assert not wrong, listed(wrong)


def test_kinds_of_features_import_neither_each_other_nor_the_registry(sources):
    wrong = []
    for reference in sources.references:
        here, there = kind_of(reference.importer), kind_of(reference.imported)
        if here and sources.room(reference.imported) == "features" and there != here:
            wrong.append(str(reference))
    for file in FEATURE_FILES:
        kind = kind_of(name_of(file))
        for feature in declared(file):
            for named in (*(patch.impl for patch in feature.patches), feature.on_finalize):
                if kind_of(named.partition(":")[0]) not in ("", kind):
                    wrong.append(f"{feature.name}: {named}")
    assert not wrong, listed(wrong)


def test_no_modules_import_each_other_in_a_circle(sources):
    edges: dict[str, set[str]] = {name: set() for name in sources.files}
    for reference in sources.references:
        # A declaration names its implementations in strings, and they import its options.
        if not reference.string:
            edges[reference.importer].add(reference.imported)
    for file in FEATURE_FILES:
        edges[FEATURES].add(name_of(file))  # the registry finds them by folder
    for name, imported in edges.items():
        imported.discard(name)
    wrong = [" -> ".join(circle) for circle in circles(edges)]
    assert not wrong, listed(wrong)


def test_strings_name_modules_that_exist(sources):
    """A string like ``"mindspeed_dsa.x.y:z"`` is no import: a renamed module would go unnoticed."""
    gone = []
    for name, tree in sources.trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                match = re.fullmatch(rf"({PACKAGE}(?:\.\w+)+):[\w.]+", node.value)
                if match and match[1] not in sources.files:
                    gone.append(f"{name}:{node.lineno}: {node.value}")
    assert not gone, listed(gone)


def test_cases_that_tests_name_exist():
    """Workers of a pool import a case that a string names, often only in long tests."""
    texts = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts): file.read_text()
        for file in (ROOT / "tests").rglob("*.py")
    }
    gone = []
    for name, text in texts.items():
        modules = {"__name__": name, **dict(re.findall(r'^(\w+) = "(tests\.[\w.]+)"$', text, re.MULTILINE))}
        named = re.findall(r'"(tests\.[\w.]+):(\w+)"', text)
        named += [
            (modules[module], case)
            for module, case in re.findall(r'f"{(\w+)}:(\w+)"', text)
            if module in modules
        ]
        for module, case in set(named):
            if not re.search(
                rf"^(def {case}\(|class {case}\b|{case} =|from .*\b{case}\b)", texts.get(module, ""), re.M
            ):
                gone.append(f"{name}: {module}:{case}")
    assert not gone, listed(gone)


# -- features ----------------------------------------------------------------------------------


def declared(file: Path):
    return declared_in(name_of(file))


def test_every_folder_of_features_is_a_kind():
    folders = {path.name for path in (FOLDER / "features").iterdir() if any(path.rglob("*.py"))}
    assert folders == set(KINDS)


def test_the_registry_finds_every_feature():
    found = [feature.name for file in FEATURE_FILES for feature in declared(file)]
    assert sorted(found) == sorted(feature.name for feature in built_in())
    assert len(set(found)) == len(found)


def test_a_switch_is_declared_in_one_file(sources):
    """Flags, options, activation, rewrite and checks need no torch, and belong in ``feature.py``."""
    names = ("options", "validation", "arguments")
    wrong = [name for name in sources.files if kind_of(name) and name.rpartition(".")[2] in names]
    assert not wrong, listed(wrong)


def test_options_are_frozen_and_made_by_of():
    wrong = []
    for file in FEATURE_FILES:
        for feature in declared(file):
            if feature.options is None:
                continue
            made_by = getattr(feature.options, "__self__", None)
            if feature.options.__name__ != "of" or not dataclasses.is_dataclass(made_by):
                wrong.append(f"{feature.name}: options is not the `of` of a dataclass")
            elif not made_by.__dataclass_params__.frozen:
                wrong.append(f"{feature.name}: {made_by} is not frozen")
            elif made_by.__module__ != name_of(file) and not made_by.__module__.startswith(
                f"{PACKAGE}.megatron."
            ):
                wrong.append(f"{feature.name}: {made_by} is of another feature")
    assert not wrong, listed(wrong)


def keyed_by_context(tree: ast.Module) -> list[ast.AnnAssign]:
    """Return the variables of a module with a type that mentions a context."""
    return [
        node
        for node in tree.body
        if isinstance(node, ast.AnnAssign)
        and node.value is not None
        and any(isinstance(part, ast.Name) and part.id == "Context" for part in ast.walk(node.annotation))
    ]


def test_state_of_a_session_lies_in_its_context(sources):
    """A module's dictionary by context would outlive the session that its values refer to."""
    refused = "_steps: WeakKeyDictionary[Context[Options], Step] = WeakKeyDictionary()"
    assert keyed_by_context(ast.parse(refused))
    wrong = [
        f"{name}:{node.lineno}: keep {ast.unparse(node.target)} in Context.state"
        for name, tree in sources.trees.items()
        for node in keyed_by_context(tree)
    ]
    assert not wrong, listed(wrong)


def test_checks_have_one_shape():
    """All are ``check_*(args, options)``, so that a caller needs to know no feature."""
    default = type(built_in()[0]).__dataclass_fields__["check"].default
    wrong = [
        f"{feature.name}: {feature.check.__module__}.{feature.check.__name__}"
        for feature in built_in()
        if feature.check is not default
        and not (
            feature.check.__name__.startswith("check_")
            and list(inspect.signature(feature.check).parameters) == ["args", "options"]
        )
    ]
    assert not wrong, listed(wrong)


def test_names_of_files_say_what_they_do():
    """Older names said how a file was used instead of naming its contents."""
    pattern = re.compile(r"(^declare|_declare|_impl|_limits)\.py$")
    wrong = [str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.py") if pattern.search(path.name)]
    assert not wrong, listed(wrong)


def found_tests(file: Path) -> list[Path]:
    """Return the test files of a declaration: the mirrored places, and those that its docstring names.

    The mirrored places of ``features/memory/swap_attention/feature.py`` are in ``tests/features/memory``: the
    folder ``swap_attention`` and files ``test_swap_attention*.py``. The docstring says ``tests: PATH, PATH``.
    """

    def below(path: Path) -> list[Path]:
        return [path] if path.is_file() else sorted(path.rglob("test_*.py"))

    place = ROOT / "tests" / file.parent.relative_to(FOLDER)
    mirrored = [place, *place.parent.glob(f"test_{place.name}*.py")]
    lines = re.findall(r"^tests: (.+)$", ast.get_docstring(ast.parse(file.read_text())) or "", re.MULTILINE)
    named = [ROOT / path for line in lines for path in line.split(", ")]
    gone = [str(path.relative_to(ROOT)) for path in named if not below(path)]
    assert not gone, f"{file.relative_to(ROOT)} says `tests:` {', '.join(gone)}, where there are none"
    return [test for path in (*named, *mirrored) for test in below(path)]


@pytest.mark.parametrize("file", FEATURE_FILES, ids=lambda file: "/".join(file.parts[-3:-1]))
def test_tests_are_found_from_the_folder_of_a_feature(file):
    names = ", ".join(feature.name for feature in declared(file))
    mirrored = Path("tests") / file.parent.relative_to(FOLDER)
    assert found_tests(file), (
        f"{names}: there are no tests in {mirrored}, and the docstring of {file.relative_to(ROOT)} has no "
        "line `tests: PATH` that says where they are"
    )


def test_folders_of_features_have_no_init(sources):
    """``feature.py`` documents the folder."""
    wrong = [str(file.relative_to(FOLDER)) for file in (FOLDER / "features").rglob("*/__init__.py")]
    assert not wrong, listed(wrong)


def test_declarations_import_neither_torch_nor_megatron(sources):
    """Their imports must not, either: doctor and --help run before both."""
    wrong = []
    names = []
    for file in FEATURE_FILES:
        names.append(name_of(file))
        for node in ast.walk(sources.trees[name_of(file)]):
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
