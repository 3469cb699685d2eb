"""Environment checks: each reports a problem where there is one, and is silent elsewhere."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_dsa.environment import LEVELS, EnvironmentCheck, Finding, Machine, Surroundings
from mindspeed_dsa.features import shipped
from mindspeed_dsa.session import environment
from mindspeed_dsa.session.environment import CHECKS, checks_of, installation
from tests.session.environment_cases import CASES

ALL = {check.name: check for check in checks_of(shipped())}


def found(name, platform="cuda", args=(), variables=(), machine=(), **others):
    """Return the findings of one check, as a job on the platform would see them."""
    about = Surroundings(
        platform=platform,
        args=SimpleNamespace(**dict(args)),
        variables=dict(variables),
        machine=Machine(**dict(machine)),
        **others,
    )
    return [finding for check, finding in environment.examine(about, shipped()) if check.name == name]


@pytest.mark.parametrize(
    ("name", "platform", "given", "level", "said", "silent"),
    CASES,
    ids=[f"{case[0]}-{case[1]}-{case[3]}" for case in CASES],
)
def test_a_check_speaks_and_is_silent(name, platform, given, level, said, silent):
    (finding,) = found(name, platform, **given)
    assert finding.level == level
    assert said in str(finding)
    assert level in ALL[name].levels
    assert finding.who
    assert finding.do
    for change in silent:
        assert found(name, **{"platform": platform, **given, **change}) == [], change


def test_every_check_and_level_has_a_case():
    wanted = {(check.name, level) for check in ALL.values() for level in check.levels}
    assert {(case[0], case[3]) for case in CASES} == wanted


def test_names_are_unique_and_declared_in_full():
    assert len(ALL) == len(list(checks_of(shipped())))
    for check in ALL.values():
        assert all((check.subject, check.when, check.source, check.levels)), check.name
        assert set(check.levels) <= set(LEVELS)


def test_a_check_that_raises_stops_nothing():
    def breaks(about: Surroundings):
        raise OSError("gone")

    broken = EnvironmentCheck("broken", "x", "never", "none", ("note",), breaks)
    feature = SimpleNamespace(environment=(broken,))
    debugging = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    results = environment.examine(Surroundings("cpu", variables=debugging), [feature])
    assert [(check.name, finding.level) for check, finding in results] == [
        ("distributed-debug", "warning"),
        ("broken", "note"),
    ]
    assert "OSError('gone')" in results[1][1].what


def test_of_an_unknown_platform_only_what_holds_everywhere_is_asked():
    variables = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "CUDA_LAUNCH_BLOCKING": "1"}
    results = environment.examine(Surroundings("", variables=variables), ())
    assert [check.name for check, _ in results] == ["distributed-debug"]


def test_transfers_are_named_with_what_asks_for_them():
    args = SimpleNamespace(overlap_grad_reduce=True, context_parallel_size=2, cp_comm_type=["p2p"])
    active = [feature for feature in shipped() if feature.name in ("moe-fb-overlap", "swap-optimizer")]
    assert environment.overlaps(active, args) == (
        "all-to-alls of experts (moe-fb-overlap)",
        "the reduction of gradients (--overlap-grad-reduce)",
        "keys and values on their way round a ring (--cp-comm-type p2p)",
    )
    assert environment.overlaps((), SimpleNamespace(context_parallel_size=2, cp_comm_type=["a2a"])) == ()


def test_the_machine_is_read(tmp_path):
    for folder, patch in (("a", 1), ("b", 2)):
        core = tmp_path / folder / "megatron" / "core"
        core.mkdir(parents=True)
        (core / "package_info.py").write_text(f"MAJOR = 0\nMINOR = 16\nPATCH = {patch}\nPRE_RELEASE = ''\n")
    (tmp_path / "again").symlink_to(tmp_path / "a")
    path = [str(tmp_path / name) for name in ("none", "b", "a", "again")]
    launched = {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}
    machine = installation.read("cpu", "megatron", launched, path)
    assert [(each.folder.name, each.version) for each in machine.megatrons] == [
        ("b", "0.16.2"),
        ("a", "0.16.1"),
    ]
    assert (machine.release, machine.local_ranks, machine.world, machine.nodes) == ("0.16.2", 4, 8, 2)
    assert machine.processors >= 1
    assert machine.memory > 0
    free = machine.free(tmp_path / "not" / "made" / "yet")
    assert free == pytest.approx(machine.free(tmp_path), rel=0.2)
    assert free > 0
    assert installation.read("cpu", "megatron", {}, path).local_ranks == 0


def test_findings_are_one_sentence():
    assert str(Finding("note", "A=1", "it does nothing", "unset A")) == "A=1: it does nothing; unset A"
    assert all(isinstance(check, EnvironmentCheck) for check in CHECKS)
