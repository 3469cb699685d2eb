"""Every case runs at its smallest size, and benchmarks use only public names of the package."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import context_parallel, moe, pipeline
from benchmarks.registry import CASES
from tests.support import third_party

third_party.or_skip("megatron.core")

ROOT = Path(__file__).parents[2]
OURS = ("mindspeed_dsa", "dsa_job")
CELLS = {"moe": moe.CELLS, "pipeline": pipeline.CELLS, "context-parallel": context_parallel.CELLS}
# They need their device; tests/benchmarks/test_gpu.py and test_npu.py run their parts.
ELSEWHERE = {"gpu", "npu"}


def cases() -> Iterator[tuple[str, ...]]:
    """Yield the command line of each case, one per cell if a case is made of cells."""
    for name, case in CASES.items():
        if name not in ELSEWHERE:
            quick = ("--quick",) if case.has_quick else ()
            for cell in CELLS.get(name, [None]):
                yield (name, *quick, *(("--only", cell) if cell else ()))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("words", list(cases()), ids=" ".join)
def test_a_case_runs(words: tuple[str, ...], tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", *words, "--device", "cpu", "--json", str(result)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if "link bed: " in run.stderr:
        pytest.skip(run.stderr.splitlines()[-1])
    assert run.returncode == 0, run.stderr[-4000:]
    assert json.loads(result.read_text())["metrics"]


def test_every_cell_is_run() -> None:
    """``CELLS`` has all cases that take ``--only`` for cells."""
    made_of_cells = {
        name for name, case in CASES.items() if "link" in case.options and "only" in case.options
    }
    assert made_of_cells == set(CELLS)


def test_names_of_the_package_are_public() -> None:
    """A private name changes without notice; running the case shows whether a public name exists."""
    wrong = []
    for file in sorted((ROOT / "benchmarks").rglob("*.py")):
        private = private_names(ast.parse(file.read_text(encoding="utf-8")))
        wrong += [f"{file.relative_to(ROOT)}:{line}: {name}" for line, name in private]
    assert not wrong


def test_the_check_finds_private_names() -> None:
    tree = ast.parse(
        "from mindspeed_dsa.ops.cpu import products\n"
        "import torch\n"
        "mock.patch.object(products, '_MKL_IS_FAST', True)\n"
        "products._MKL_IS_FAST\n"
        "products.matmul, torch._C\n"
        "getattr(products, '_MKL_IS_FAST')\n"
        "from mindspeed_dsa.ops.cpu.products import _MKL_IS_FAST\n"
        "import mindspeed_dsa.ops.cpu.products as all_of_it\n"
        "all_of_it._MKL_IS_FAST\n"
    )
    assert [line for line, _ in sorted(private_names(tree))] == [3, 4, 6, 7, 9]


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the lines that import, read or replace a private name of this repository, with the name."""
    ours = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
            ours |= {alias.asname or alias.name for alias in node.names}
            yield from ((node.lineno, entry.name) for entry in node.names if entry.name.startswith("_"))
        elif isinstance(node, ast.Import):
            ours |= {entry.asname or "" for entry in node.names if entry.name.split(".")[0] in OURS}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner, names = node.value, [node.attr]
        elif isinstance(node, ast.Call) and node.args:  # getattr, mock.patch.object and similar calls
            owner, names = node.args[0], [ast.unparse(entry).strip("'") for entry in node.args[1:2]]
        else:
            continue
        if isinstance(owner, ast.Name) and owner.id in ours:
            yield from ((node.lineno, f"{owner.id}.{name}") for name in names if name.startswith("_"))
