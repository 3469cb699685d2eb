"""Compatible torch_npu and CANN releases by the vendor's tables, and the installed release of CANN."""

from __future__ import annotations

import platform

import pytest

from mindspeed_dsa.platforms import npu
from mindspeed_dsa.platforms.npu_releases import RELEASES, disagreements, installed_cann, release_of


@pytest.mark.parametrize(
    ("wheel", "name"),
    [
        ("2.9.0", "7.3.0"),
        ("2.9.0.post2", "26.0.0"),
        ("2.9.0.post4", "26.0.0"),  # a correction between two releases
        ("2.9.0.post9+git1", "26.1.0"),
        ("2.12.0", "26.1.0"),
        ("2.9.0rc1", None),
        ("2.13.0", None),
        ("main", None),
    ],
)
def test_a_wheel_belongs_to_a_release(wheel, name):
    found = release_of(wheel)
    assert (found and found.name) == name


@pytest.mark.parametrize(
    ("torch", "torch_npu", "cann", "said"),
    [
        ("2.9.0+cpu", "2.9.0.post2", "9.0.0", None),
        ("2.9.0", "2.9.0.post2", "8.5.1", None),  # compatible by the release notes
        ("2.9.0", "2.9.0", "9.1.0", None),
        ("2.9.0", "2.9.0.post2", "9.2.0-beta.2", None),  # newer than the tables
        ("2.9.0", "2.9.0.post2", None, None),
        ("2.7.1", "2.7.1", "9.0.0", "pip install --no-deps torch_npu==2.7.1.post4, or install CANN 8.3.RC1"),
        (
            "2.6.0",
            "2.6.0.post5",
            "8.3.RC2",
            "pip install --no-deps torch_npu==2.6.0.post3, or install CANN 8.5.0",
        ),
        (
            "2.12.0",
            "2.12.0",
            "8.3.RC1",
            "install torch_npu 2.6.0.post3, 2.7.1 or 2.8.0 with the torch of its",
        ),
        ("2.9.0", "2.13.0", "9.0.0", "pip install --no-deps torch_npu==2.9.0.post2"),
        (
            "2.13.0",
            "2.13.0",
            "9.0.0",
            "install torch_npu 2.7.1.post4, 2.8.0.post4, 2.9.0.post2 or 2.10.0 with",
        ),
    ],
)
def test_what_does_not_go_together_is_named_with_what_does(torch, torch_npu, cann, said):
    problems = list(disagreements(torch, torch_npu, cann))
    if said is None:
        assert problems == []
    else:
        assert [each.do.startswith(said) for each in problems] == [True], problems


def test_every_wheel_goes_with_its_own_cann():
    for release in RELEASES:
        for wheel in release.torch_npu:
            assert list(disagreements(wheel.partition(".post")[0], wheel, release.cann)) == []


OWN = f"{platform.machine()}-linux/ascend_toolkit_install.info"


@pytest.mark.parametrize(
    ("files", "release"),
    [
        ({OWN: "package_name=Ascend-cann-toolkit\nversion=8.3.RC1\ninnerversion=V100R001C23\n"}, "8.3.RC1"),
        ({"other-linux/ascend_toolkit_install.info": "version=9.0.0\n"}, "9.0.0"),
        (
            {"version.cfg": "# x\nopp_running_version=[1:8.1]\ntoolkit_running_version=[7.7:8.2.RC1]\n"},
            "8.2.RC1",
        ),
        ({"version.cfg": "toolkit_installed_version=[7.7.T9.0.B057:8.1.T6][7.7.T20:8.1.RC1]\n"}, "8.1.RC1"),
        ({"version.cfg": "nothing\n"}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("variable", ["ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH"])
def test_the_release_of_cann_is_read(tmp_path, monkeypatch, files, release, variable):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert installed_cann({variable: str(tmp_path)}) == release
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    assert npu.cann_here() == "unknown: neither ASCEND_TOOLKIT_HOME nor ASCEND_HOME_PATH is set"
    monkeypatch.setenv(variable, str(tmp_path))
    assert npu.cann_here() == (release or f"unknown: no version in {variable}={tmp_path}")


def test_a_torch_npu_that_does_not_load_is_told_with_what_does(monkeypatch):
    installed = {"torch": "2.9.0", "torch_npu": "2.13.0"}
    monkeypatch.setattr(npu.versions, "of_package", installed.get)
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    said = npu.not_loaded(ImportError("undefined symbol"))
    assert said.startswith(
        "torch_npu 2.13.0 does not load (undefined symbol); it was built for another torch than"
    )
    installed["torch"] = "2.13.0"
    assert "source its set_env.sh" in npu.not_loaded(ImportError("libhccl.so"))
