"""Installation checks before a job starts: one message, and refusal of fatal problems."""

from __future__ import annotations

import logging

import pytest

from mindspeed_dsa import log, platforms, session
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.session import environment
from mindspeed_dsa.session.environment import installation
from mindspeed_dsa.tools.cli import doctor
from tests.session.environment_cases import TRAINING, WHEEL


def checkout(folder, release="0.16.1", built=False):
    for part in ("core/datasets", "training"):
        (folder / "megatron" / part).mkdir(parents=True)
    numbers = dict(zip(("MAJOR", "MINOR", "PATCH"), release.split("."), strict=True))
    text = "".join(f"{name} = {number}\n" for name, number in numbers.items())
    (folder / "megatron/core/package_info.py").write_text(text)
    if built:
        return folder
    (folder / "megatron/core/datasets/Makefile").write_text("")
    return folder


@pytest.mark.parametrize(
    ("release", "wanted"),
    [
        ("0.12.1", {"einops", "psutil", "pyyaml", "regex", "setuptools", "six"}),
        ("0.16.1", {"psutil", "pydantic", "pyyaml", "regex", "setuptools", "six", "triton"}),
        ("0.17.1", {"psutil", "pyyaml", "setuptools"}),
        ("0.19.0", {"psutil", "setuptools", "triton"}),
    ],
)
def test_packages_of_a_checkout_by_release(monkeypatch, tmp_path, release, wanted):
    monkeypatch.setattr(installation, "find_spec", lambda name: None)
    (package,) = installation.copies("megatron", [str(checkout(tmp_path / "a", release, built=True))])
    assert set(installation.absent([package])) == wanted
    (package,) = installation.copies("megatron", [str(checkout(tmp_path / "b", release))])
    assert set(installation.absent([package])) == wanted | {"pybind11"}
    monkeypatch.setattr(installation, "find_spec", lambda name: None if name == "six" else object())
    assert installation.absent([package]) == (("six",) if "six" in wanted else ())
    assert installation.absent([WHEEL]) == ()


@pytest.fixture
def lines(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger(log.NAME), "propagate", True)
    log.forget()
    return caplog


def test_a_missing_package_is_told_once_before_the_start(monkeypatch, lines):
    monkeypatch.setattr(installation, "absent", lambda found: ("six",))
    monkeypatch.setattr(installation, "copies", lambda root, path=None: (TRAINING,))
    with session.enabled(experimental_attention_variant="dsa", use_fused_dsa=True):
        session.current().look_at_installation()
        session.current().look_at_installation()
    (told,) = (each for each in lines.messages if "six" in each)
    assert told == (
        "environment: error: Megatron-LM 0.16.1: it needs six, which is not installed; pip install six "
        "[megatron-lm-packages]"
    )


def test_more_ranks_than_devices_are_refused(monkeypatch):
    monkeypatch.setattr(installation, "_devices", lambda platform: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    check = next(each for each in environment.CHECKS if each.name == "devices-for-ranks")
    monkeypatch.setattr(environment, "_applies", lambda each, platform: each is check)
    with session.enabled(experimental_attention_variant="dsa", use_fused_dsa=True):
        with pytest.raises(
            SettingsError, match="no job starts here:\n  - 3 ranks on a node: they see 2 devices"
        ):
            session.current().look_at_installation()
        monkeypatch.setenv("LOCAL_RANK", "1")
        session.current().look_at_installation()
    with session.enabled():  # with nothing enabled there is no check
        monkeypatch.setenv("LOCAL_RANK", "2")
        monkeypatch.setattr(session.current(), "features", [])
        session.current().look_at_installation()


def test_doctor_looks_at_what_is_installed_without_a_job(monkeypatch):
    monkeypatch.setattr(installation, "absent", lambda found: ("six",))
    found = doctor.examine([])
    assert [each["check"] for each in found["environment"]] == ["megatron-lm-packages"]
    assert doctor.as_text(found).startswith("PROBLEM: 1 error of the environment, below\n")


def test_doctor_names_a_torch_npu_that_does_not_load(monkeypatch):
    def raises():
        raise SettingsError("platform npu: torch_npu 2.9.0 does not load (libhccl.so)")

    monkeypatch.setattr(platforms.get("npu"), "is_available", raises)
    assert "platform npu: torch_npu 2.9.0 does not load (libhccl.so)" in doctor.examine([])["problems"]
    assert doctor.examine(["--mindspeed-platform", "cpu"])["problems"] == []


def test_torch_that_fails_with_its_torch_npu_is_one_message(monkeypatch):
    import builtins

    original = builtins.__import__

    def no_torch(name, *rest):
        if name == "torch":
            raise RuntimeError("Failed to load the backend extension: torch_npu.") from ImportError(
                "libhccl.so"
            )
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", no_torch)
    with pytest.raises(
        SettingsError, match=r"torch is not imported, because torch_npu .*libhccl.so.*AUTOLOAD=0"
    ):
        platforms.detect()
