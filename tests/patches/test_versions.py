"""The release number that selects patches; a pre-release counts as the release that it leads to."""

from __future__ import annotations

import sys

import pytest

from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.spec import Patch


@pytest.mark.parametrize(
    ("parts", "release", "written"),
    [
        ((0, 16, 0, "rc0"), "0.16.0", "0.16.0rc0"),
        ((0, 19, 0, "dev1"), "0.19.0", "0.19.0dev1"),
        ((0, 16, 1, ""), "0.16.1", "0.16.1"),
        ((0, 17, 0, "+corp.3"), "0.17.0+corp.3", "0.17.0+corp.3"),
        ((0, 17, 0, "-of-a-commit"), "0.17.0-of-a-commit", "0.17.0-of-a-commit"),
    ],
)
def test_a_branch_on_its_way_to_a_release(tmp_path, monkeypatch, parts, release, written):
    core = tmp_path / "corp_megatron" / "core"
    core.mkdir(parents=True)
    (core.parent / "__init__.py").touch()
    names = ("MAJOR", "MINOR", "PATCH", "PRE_RELEASE")
    lines = [f"{name} = {value!r}" for name, value in zip(names, parts, strict=True)]
    (core / "package_info.py").write_text("\n".join(lines))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert versions.of_megatron("corp_megatron") == release
    assert versions.installed("corp_megatron")["megatron-core"] == written


@pytest.mark.parametrize("covered", [">=0.16,<0.19", "<0.16"])
def test_a_branch_is_in_one_of_two_ranges_that_meet(tmp_path, monkeypatch, covered):
    monkeypatch.setattr(versions, "_written", lambda root: "0.16.0rc0")
    patch = Patch("megatron.core.a:f", "wrap", "a:f", "why", versions=covered)
    is_outside = bool(versions.outside(patch, versions.of_package))
    assert is_outside == (covered == "<0.16")
