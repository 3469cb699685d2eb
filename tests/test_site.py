"""The site has every page and the public interface, and a broken link is an error."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mindspeed_dsa

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "examples", "mindspeed_dsa", "benchmarks/results", "tests/npu/device")

pytestmark = pytest.mark.full
pytest.importorskip("mkdocs", reason="the extra `site` is not installed")


def checkout(folder: Path) -> Path:
    """Copy the sources of the site."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [*ROOT.glob("*.md"), ROOT / "LICENSE", ROOT / "mkdocs.yml"]:
        shutil.copy(path, folder)
    return folder


def build(folder: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "mkdocs", "build"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = checkout(tmp_path_factory.mktemp("site"))
    status, said = build(folder)
    assert status == 0, said
    return folder / "runs" / "site"


def html(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def test_every_page_is_there(site):
    pages = [path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]]
    for page in pages:
        folder = page.parent if page.name == "README.md" else page.with_suffix("")
        assert (site / folder / "index.html").is_file(), page


def test_files_of_the_repository_are_where_pages_link_to(site):
    assert (site / "LICENSE").is_file()
    assert (site / "benchmarks" / "results" / "gpu-h100.json").is_file()
    assert (site / "examples" / "plugin" / "dsa_router_load" / "feature.py").is_file()


def test_the_reference_has_every_public_name_with_what_it_does(site):
    page = html(site / "docs" / "reference" / "index.html")
    assert all(f'id="mindspeed_dsa.{name}"' in page for name in mindspeed_dsa.__all__)
    assert 'id="mindspeed_dsa.ops.dsa.sparse_flash_attention"' in page
    assert 'id="mindspeed_dsa.rl.write_recording"' in page
    assert 'id="mindspeed_dsa.transformers.apply_dsa"' in page
    assert "Switch features on from code" in page
    assert ":func:" not in page


def test_anchors_in_chinese_are_those_of_the_headings(site):
    page = html(site / "docs" / "zh" / "quickstart" / "index.html")
    assert 'id="融合与原生对照"' in page


def test_what_leads_nowhere_is_an_error(tmp_path):
    folder = checkout(tmp_path)
    page = folder / "docs" / "quickstart.md"
    page.write_text(
        page.read_text(encoding="utf-8")
        + "\n[a](gone.md) [b](troubleshooting.md#gone) [c](../gone.json) ![d](images/gone.png)\n"
    )
    status, said = build(folder)
    assert status != 0
    warnings = re.findall(r"WARNING.*docs/quickstart\.md' contains a link '([^']*)'", said)
    assert sorted(set(warnings)) == [
        "../gone.json",
        "gone.md",
        "images/gone.png",
        "troubleshooting.md#gone",
    ], said
