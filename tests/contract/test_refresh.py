"""Reading releases again: wheels, then tags for parts that wheels lack; unreadable ones stay as recorded."""

from __future__ import annotations

import os
import subprocess
import zipfile

import pytest

from mindspeed_dsa.feature import Feature
from mindspeed_dsa.patches.drift import TargetFacts
from mindspeed_dsa.patches.errors import MindSpeedDSAError
from mindspeed_dsa.patches.source_tree import SourceTree
from mindspeed_dsa.patches.spec import Patch
from mindspeed_dsa.session.records import Records
from mindspeed_dsa.tools.compat import refresh
from mindspeed_dsa.tools.compat import refresh as refreshing
from tests.support.drift_packages import write

CORE = Patch("megatron.core.a:f", "wrap", "implementation:f", "a test wants it", params=("x", "y", "new"))
TRAINING = Patch("megatron.training.b:g", "wrap", "implementation:g", "a test wants it", params=("args", "z"))


@pytest.fixture
def releases(tmp_path, monkeypatch):
    """Make wheels of two releases without ``megatron.training``, in the folder that is the cache."""
    monkeypatch.setattr(refreshing, "RELEASES", ("0.16.0", "0.16.1"))
    features = (Feature("f", "does f", patches=(CORE, TRAINING)),)
    rows = [(feature, patch) for feature in features for patch in feature.patches]
    monkeypatch.setattr(refreshing, "megatron_patches", lambda: rows)
    for release, text in (("0.16.0", "def f(x): ...\n"), ("0.16.1", "def f(x, unneeded, y): ...\n")):
        with zipfile.ZipFile(tmp_path / f"megatron_core-{release}-cp312-x.whl", "w") as archive:
            archive.writestr("megatron/core/__init__.py", "")
            archive.writestr("megatron/core/a.py", text)
    return tmp_path


def test_reads_wheels_and_keeps_what_they_lack(releases):
    kept = TargetFacts(True, params=("z",))
    refreshed = refreshing.refresh(Records({"megatron.training.b:g": {"0.16.0": kept}}), releases)
    assert refreshed.facts["megatron.core.a:f"]["0.16.0"].params == ("x",)
    assert refreshed.facts["megatron.core.a:f"]["0.16.1"].params == ("x", "y")
    assert refreshed.facts["megatron.training.b:g"] == {"0.16.0": kept}


def test_reads_tags_of_a_clone(releases, tmp_path):
    clone = tmp_path / "clone"
    write(clone, {"megatron/training/b.py": "def g(args): ...\n", "megatron/core/a.py": "def other(): ...\n"})
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-C", str(clone)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "t"], check=True)
    subprocess.run([*git, "tag", "core_v0.16.0"], check=True)
    with pytest.raises(MindSpeedDSAError, match=r"core_v0\.16\.1"):
        refreshing.refresh(Records({}), releases, clone)
    subprocess.run([*git, "tag", "core_v0.16.1"], check=True)
    refreshed = refreshing.refresh(Records({}), releases, clone)
    assert refreshed.facts["megatron.training.b:g"]["0.16.0"].params == ("args",)
    assert refreshed.facts["megatron.core.a:f"]["0.16.0"].params == ("x",), "the wheel comes first"
    assert refreshed.main is None
    assert "main" not in refreshed.facts["megatron.training.b:g"]


def test_wheel_with_the_training_code_needs_no_tag(releases):
    for wheel in releases.glob("*.whl"):
        with zipfile.ZipFile(wheel, "a") as archive:
            archive.writestr("megatron/training/b.py", "def g(z): ...\n")
    found = refreshing.refresh(Records({}), releases, releases)
    assert found.facts["megatron.training.b:g"]["0.16.1"].params == ("z",)


def test_reads_the_newest_main_of_a_clone(releases, tmp_path, monkeypatch):
    """A clone's branch may lag behind the fetched one, and a mirror's remote branch behind its own."""
    monkeypatch.setattr(refreshing, "RELEASES", ())
    clone = tmp_path / "clone"
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-C", str(clone)]

    def commit(day: int, parameter: str) -> None:
        info = "MAJOR = 0\nMINOR = 20\nPATCH = 0\nPRE_RELEASE = ''\n"
        text = f"def f({parameter}): ...\n"
        write(clone, {"megatron/core/package_info.py": info, "megatron/core/a.py": text})
        when = f"2026-08-{day}T12:00:00Z"
        subprocess.run([*git, "add", "."], check=True)
        dates = {"GIT_AUTHOR_DATE": when, "GIT_COMMITTER_DATE": when}
        command = [*git, "commit", "-q", "-m", "t"]
        subprocess.run(command, check=True, env={**os.environ, **dates})

    write(clone, {"megatron/core/__init__.py": ""})
    subprocess.run([*git, "init", "-q", "-b", "main"], check=True)
    commit(20, "old")
    subprocess.run([*git, "update-ref", "refs/remotes/origin/main", "HEAD"], check=True)
    commit(22, "new")
    refreshed = refreshing.refresh(Records({}), releases, clone)
    assert refreshed.main is not None
    assert (refreshed.main.version, refreshed.main.date, len(refreshed.main.commit)) == (
        "0.20.0",
        "2026-08-22",
        40,
    )
    assert refreshed.facts["megatron.core.a:f"]["main"].params == ("new",)
    assert refreshed.facts["megatron.training.b:g"]["main"].exists is False
    subprocess.run([*git, "update-ref", "refs/remotes/origin/main", "HEAD"], check=True)
    subprocess.run([*git, "reset", "-q", "--hard", "HEAD~"], check=True)
    assert refreshing.refresh(refreshed, releases, clone) == refreshed
    assert refreshing.refresh(refreshed, releases).main == refreshed.main, (
        "without a clone it stays as recorded"
    )


def test_package_that_a_whole_release_lacks(releases, tmp_path, monkeypatch):
    monkeypatch.setattr(refreshing, "_sources", lambda clone, ref: SourceTree.folder(tmp_path))
    found = refreshing.refresh(Records({}), releases, tmp_path)
    assert found.facts["megatron.training.b:g"]["0.16.1"].exists is False
    assert refreshing.refresh(Records({}), releases).facts["megatron.training.b:g"] == {}


def test_release_that_pip_cannot_fetch(tmp_path, monkeypatch):
    asked = []

    def refuse(release, interpreter, folder):
        asked.append(interpreter)
        return "ERROR: No matching distribution found"

    monkeypatch.setattr(refresh, "_download", refuse)
    with pytest.raises(MindSpeedDSAError, match=r"megatron-core 0\.99 \(ERROR: No matching distribution"):
        refresh.fetch("0.99", tmp_path)
    assert asked == ["3.12", "3.11", "3.10"]


def test_wheel_is_fetched_once(tmp_path, monkeypatch):
    def download(release, interpreter, folder):
        if interpreter == "3.11":  # an old release without a wheel for 3.12
            (folder / f"megatron_core-{release}-cp311-x.whl").touch()
        return ""

    monkeypatch.setattr(refresh, "_download", download)
    first = refresh.fetch("0.12.1", tmp_path / "cache")
    monkeypatch.setattr(refresh, "_download", None)
    assert refresh.fetch("0.12.1", tmp_path / "cache") == first
