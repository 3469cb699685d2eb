"""The example plug-in, built and installed as by a user."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "plugin"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs Python with the plug-in installed, in a separate folder on the path."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(
        EXAMPLE, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    )
    site = folder / "site"
    path = os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])

    def python(*argv, run=subprocess.run):
        return run(
            [sys.executable, *map(str, argv)],
            capture_output=True,
            text=True,
            timeout=200,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
        )

    # Its dependencies are installed already, and nothing needs the network.
    built = python(
        *("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", site),
        *("--no-index", "--no-deps", "--no-build-isolation", source),
    )
    assert built.returncode == 0, built.stderr
    return python


def test_doctor_finds_it_and_its_patch_is_applied(run):
    done = run("-m", "mindspeed_dsa", "doctor", "--json", "--log-router-load", run=warm.run)
    report = json.loads(done.stdout)
    assert report["problems"] == []
    assert done.returncode == 0
    row = next(row for row in report["features"] if row["name"] == "router-load")
    assert row["on"]
    assert row["plugin"] == "mindspeed-dsa-router-load 0.1.0"
    assert row["set_by"] == "argv (--log-router-load)"
    (site,) = [site for site in report["sites"] if site["features"] == ["router-load"]]
    assert site["state"] == "applied"
    assert site["stack"] == ["dsa_router_load.router:log_load"]


def test_explain_knows_its_flags(run):
    done = run("-m", "mindspeed_dsa", "explain", "MINDSPEED_DSA_ROUTER_LOAD_INTERVAL")
    assert done.returncode == 0, done.stderr
    assert "router-load (plug-in mindspeed-dsa-router-load 0.1.0)" in done.stdout
    done = run("-m", "mindspeed_dsa", "explain", "router-load")
    assert "TopKRouter.forward" in done.stdout


def test_declarations_load_neither_torch_nor_megatron(run):
    done = run(
        "-c",
        "import sys; from mindspeed_dsa import features; names = [f.name for f in features.all_features()]; "
        "print('router-load' in names, {'torch', 'megatron'} & set(sys.modules))",
    )
    assert done.stdout.split(maxsplit=1) == ["True", "set()\n"], done.stderr


@pytest.mark.full
def test_its_own_tests_pass(run):
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", "source", "source/tests")
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout
