"""Names that programs import: the page's list, the modules, and the imports in the pages' own blocks."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import get_args

import pytest

import mindspeed_dsa
from mindspeed_dsa.ops import dsa

ROOT = Path(__file__).parents[2]
PACKAGE = "mindspeed_dsa"
PAGE = ROOT / "docs/hosts/operators.md"
MAY_CHANGE = {
    "mindspeed_dsa.context_parallel.algorithms": "strategies of one's own, a page of the design",
    "mindspeed_dsa.context_parallel.gather": "as above",
    "mindspeed_dsa.context_parallel.layout": "as above",
    "mindspeed_dsa.context_parallel.strategy": "as above",
    "mindspeed_dsa.parallel.all_to_all": "as above",
    "mindspeed_dsa.runs": "reads files whose form may change",
}
"""Modules that blocks of pages import without a promise that their names stay, with the reasons."""


def listed() -> dict[str, list[str]]:
    """Return the names in the page's table, by module."""
    section = PAGE.read_text(encoding="utf-8").partition("## Stable names")[2]
    rows = re.findall(r"^\| `([\w.]+)` \| (.+?) \|", section, re.M)
    return {module: re.findall(r"`(\w+)`", names) for module, names in rows}


def exported(module: str) -> list[str]:
    """Return ``__all__`` from a module's source, as TorchTitan's host cannot be imported without it."""
    place = ROOT / module.replace(".", "/")
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        assigned = isinstance(node, ast.Assign | ast.AugAssign)
        targets = [node.target] if isinstance(node, ast.AugAssign) else getattr(node, "targets", [])
        if assigned and any(getattr(target, "id", "") == "__all__" for target in targets):
            names += ast.literal_eval(node.value)
    return sorted(names)


@pytest.mark.parametrize("module", sorted(listed()))
def test_the_page_lists_what_a_module_exports(module):
    expected = ["INTERFACE"] if module == dsa.__name__ else exported(module)
    assert sorted(listed()[module]) == expected


def test_the_list_has_every_module_with_names_that_stay():
    assert {
        PACKAGE,
        *(f"{PACKAGE}.{name}" for name in mindspeed_dsa._MODULES),
        dsa.__name__,
    } <= set(listed())


def imports_of_pages() -> list[tuple[str, str]]:
    """Return the page and the module of every import of the package in a block of a page."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    imports = []
    for page in pages:
        blocks = re.findall(r"^( *)```python\n(.*?)^\1```", page.read_text(encoding="utf-8"), re.M | re.S)
        for _, block in blocks:
            modules = re.findall(rf"^ *(?:from|import) ({PACKAGE}[\w.]*)", block, re.M)
            imports += [(str(page.relative_to(ROOT)), module) for module in modules]
            # `from mindspeed_dsa.ops import dsa` names a module in its second half.
            for package, names in re.findall(rf"^ *from ({PACKAGE}[\w.]*) import ([\w, ]+)", block, re.M):
                inner = [f"{package}.{name.strip()}" for name in names.split(",")]
                if package not in listed() and set(inner) <= set(listed()):
                    imports.remove((str(page.relative_to(ROOT)), package))
    return imports


def test_pages_import_names_that_stay():
    imports = imports_of_pages()
    assert any(module == "mindspeed_dsa.rl" for _, module in imports)
    wrong = [f"{page}: {module}" for page, module in imports if module not in {*listed(), *MAY_CHANGE}]
    assert not wrong, "\n".join(["", *wrong])
    unused = set(MAY_CHANGE) - {module for _, module in imports}
    assert not unused, unused


def test_importing_the_package_imports_neither_torch_nor_megatron_nor_a_host():
    """Modules that need torch are imported on first use, and transformers when a model is served."""
    code = (
        "import sys\nimport mindspeed_dsa\nmindspeed_dsa.enable\n"
        "assert not {'torch', 'megatron', 'transformers'} & set(sys.modules)\n"
        "assert callable(mindspeed_dsa.transformers.apply_dsa)\n"
        "assert callable(mindspeed_dsa.rl.decode) and callable(mindspeed_dsa.weights.load)\n"
        "assert not {'megatron', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_former_names_are_the_same_things():
    """The names of 0.2.0 still work."""
    from mindspeed_dsa.integrations import transformers

    assert transformers.use is mindspeed_dsa.transformers.apply_dsa
    assert {"stage", "loss_coefficient", "backend"} <= set(signature(transformers.use).parameters)
    assert "warm-up" in get_args(dsa.Stage)
