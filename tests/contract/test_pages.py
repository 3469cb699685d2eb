"""Code that the pages name exists: paths, imports of examples, whole files."""

from __future__ import annotations

import ast
import re
import textwrap
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest

from mindspeed_dsa.features import all_flags
from mindspeed_dsa.settings import GENERAL_FLAGS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mindspeed_dsa"
PAGES = sorted(
    path
    for path in (
        *ROOT.glob("*.md"),
        *(path for folder in ("docs", "examples", "mindspeed_dsa") for path in (ROOT / folder).rglob("*.md")),
    )
    if path.name != "CHANGELOG.md"  # it names files of earlier versions
)
TOP = ("mindspeed_dsa", "tests", "docs", "benchmarks")
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if path.is_dir() and not path.name.startswith("_"))
NAMED = re.compile(
    rf"(?<![\w/.-])(?:(?:{'|'.join(TOP)})/[\w./*{{}},-]*[\w}}/*]|(?:{'|'.join(ROOMS)})/[\w./*{{}},-]*\.py)(?![\w-])"
)
"""Paths from the root of the checkout, and files of the package from the package's folder."""
OTHERS = {"tools/preprocess_data.py"}
"""Files of Megatron-LM in a folder that is named like a room."""


def expanded(path: str) -> list[str]:
    """Return ``a/{b,c}.py`` as ``a/b.py`` and ``a/c.py``."""
    parts = [part.split(",") for part in re.split(r"[{}]", path)]
    parts = [[",".join(part)] if index % 2 == 0 else part for index, part in enumerate(parts)]
    return ["".join(chosen) for chosen in product(*parts)]


def missing(text: str, beside: Path = ROOT) -> list[str]:
    """Return the named paths that exist neither here nor in the page's own folder."""
    paths = {path for named in NAMED.findall(text) if named not in OTHERS for path in expanded(named)}
    return sorted(
        path for path in paths if not any(any(folder.glob(path)) for folder in (ROOT, PACKAGE, beside))
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_that_a_page_names_exist(page):
    assert not missing(page.read_text(encoding="utf-8"), page.parent)


def test_a_path_that_is_gone_is_named():
    text = "`tests/no.py`, ops/backend.py and `mindspeed_dsa/patches/{site,lost}.py`, see session/gone.py."
    assert missing(text) == ["mindspeed_dsa/patches/lost.py", "session/gone.py", "tests/no.py"]


# -- code on pages -----------------------------------------------------------------------------

ENABLE = re.compile(r"mindspeed_dsa\.enabled?\(([^)]*)\)")
IMAGINED = {"use_x", "MINDSPEED_DSA_USE_X", "log_router_load"}
"""Switches that pages make up as examples."""
KEYWORD = re.compile(r"(\w+)=")
VARIABLE = re.compile(r"\bMINDSPEED_DSA_\w+\b(?=[`= |])")
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```", re.M | re.S)


def blocks(page: Path) -> list[str]:
    """Return the Python examples on a page."""
    return [textwrap.dedent(code) for _, code in BLOCK.findall(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(
    "page", [p for p in PAGES if blocks(p)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_examples_import_what_is_there(page):
    for code in blocks(page):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Import):
                names = [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "", alias.name) for alias in node.names]
            else:
                continue
            for module, name in names:
                host = module.removeprefix("mindspeed_dsa.integrations.").partition(".")[0]
                if not find_spec(host):  # tests/hosts, where it is
                    continue
                if module.partition(".")[0] == "mindspeed_dsa" and module != "mindspeed_dsa.megatron_adaptor":
                    found = import_module(module)
                    assert not name or hasattr(found, name) or import_module(f"{module}.{name}")


def test_switches_that_pages_set_exist():
    """Covers keywords of ``enable`` and ``enabled``, and environment variables."""
    flags = [*GENERAL_FLAGS, *all_flags()]
    keywords, variables = {flag.dest for flag in flags}, {flag.env for flag in flags}
    wrong, checked = [], 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        said = {name: keywords for call in ENABLE.findall(text) for name in KEYWORD.findall(call)}
        said |= dict.fromkeys(VARIABLE.findall(text), variables)
        checked += len(said)
        unknown = [name for name, known in said.items() if name not in known | IMAGINED]
        wrong += [f"{page.relative_to(ROOT)}: {name}" for name in unknown]
    assert not wrong, "\n".join(wrong)
    assert checked > 200


def test_functions_of_the_walks_are_in_the_files_beside_them():
    """Covers the rows of ``architecture.md``: number, files, functions."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    walked = 0
    for row in re.findall(r"^\| [\d to]+ \|(.*)\|(.*)\|$", text, flags=re.M):
        files = [path for named in NAMED.findall("".join(row)) for path in expanded(named)]
        files += re.findall(r"`(\w+\.py)`", row[0])
        code = "\n".join((PACKAGE / file).read_text(encoding="utf-8") for file in files)
        for name in re.findall(r"`(?:\w+\.)*(\w+)(?:\([^`]*\))?`", row[1]):
            walked += 1
            assert re.search(rf"\b{name}\b", code), f"{name} is in none of {files}"
    assert walked > 20
