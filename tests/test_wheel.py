"""The wheel: two builds of the same sources have the same bytes, and it works without a checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = ("LICENSE", "README.md", "pyproject.toml", "setup.py")
COMMIT_TIME = 1_750_000_000

pytestmark = pytest.mark.full


def sources(folder: Path, modified: int) -> Path:
    """Copy the inputs of a build, with modification times of another checkout."""
    shutil.copytree(
        ROOT / "mindspeed_dsa",
        folder / "mindspeed_dsa",
        ignore=shutil.ignore_patterns("__pycache__", "*.pyc"),
    )
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    for path in folder.rglob("*"):
        os.utime(path, (modified, modified))
    return folder


def built(folder: Path) -> tuple[Path, Path]:
    """Build as ``make dist`` does; return the wheel, built from the source distribution, and the latter."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(folder)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(COMMIT_TIME)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (archive,) = (list((folder / "dist").glob(kind)) for kind in ("*.whl", "*.tar.gz"))
    return wheel, archive


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """Return wheels and source distributions of two builds, a day and a folder apart."""
    first = built(sources(tmp_path_factory.mktemp("here"), COMMIT_TIME + 60))
    second = built(sources(tmp_path_factory.mktemp("somewhere_else"), COMMIT_TIME + 86_400))
    return first, second


def test_two_builds_are_the_same_bytes(distributions):
    (first, _), (second, _) = distributions
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()


def test_the_wheel_has_every_file_of_the_package(distributions):
    """A file that the wheel or the source distribution leaves out is named here."""
    (wheel, archive), _ = distributions
    there = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "mindspeed_dsa").rglob("*")
        if path.suffix in {".py", ".json", ".typed"}
    }
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert there <= packed
    assert not {name for name in packed if not name.startswith("mindspeed_dsa")}
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert there | set(FILES) <= names


@pytest.fixture(scope="module")
def python(distributions, tmp_path_factory):
    """Return the interpreter of a fresh environment with the wheel; torch and Megatron come from this one."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    fresh = folder / "bin" / "python"
    completed = subprocess.run(
        [fresh, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    target = Path(completed.stdout.strip())
    (wheel, _), _ = distributions
    install = ["--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "install", *install], check=True, timeout=120)
    # A line of a .pth file is a folder whose own .pth files, as an editable installation's, do not count.
    (target / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return fresh


def run(python, folder, *argv):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), *argv]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


def test_commands_work_without_a_checkout(python, tmp_path):
    where = run(python, tmp_path, "-c", "import mindspeed_dsa; print(mindspeed_dsa.__file__)")
    assert str(ROOT) not in where.stdout
    version = run(python, tmp_path, "-m", "mindspeed_dsa", "--version").stdout.split()[1]
    assert f'version="{version}"' in (ROOT / "setup.py").read_text()
    for argv in (["doctor", "--use-fused-dsa"], ["features"], ["explain", "fused-dsa"], ["plan", "--help"]):
        done = run(python, tmp_path, "-m", "mindspeed_dsa", *argv)
        assert done.returncode == 0, done.stdout + done.stderr


def test_try_works_without_a_checkout(python, tmp_path):
    done = run(python, tmp_path, "-m", "mindspeed_dsa", "try", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "runs" / "try" / "try.json").read_text())
    assert found["largest_difference"] < 1e-5
    log = (tmp_path / "runs" / "try" / "fused.log").read_text()
    # Warnings name files of packages, which may be installed below the checkout.
    assert str(ROOT) not in log.replace(sysconfig.get_path("purelib"), "")
