"""Features of other distributions are found, and named in errors that they cause."""

from __future__ import annotations

import argparse
import re
import sys

import pytest

import mindspeed_dsa
from mindspeed_dsa import PatchError, SettingsError, features, log, session
from mindspeed_dsa.__main__ import main
from mindspeed_dsa.tools.cli import doctor
from tests.support import fork

FEATURE = """
from mindspeed_dsa import Feature, Flag, Patch, Requires
FEATURE = Feature(
    "counting", "counts calls", (Flag("--use-counting", "count calls"),),
    (Patch("megatron.core.layers:{target}", "wrap", "corp_megatron_impl:count", "a test wants it"),),
)
"""
GOOD = FEATURE.format(target="scale")


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a distribution with one module and one entry point, next to a Megatron
    fork.
    """
    root = fork.write(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MINDSPEED_DSA_MEGATRON_ROOT", root)
    monkeypatch.setattr(features, "built_in", lambda: ())  # the fork is too small for most features
    # Distributions are read once per process.
    features.plugins.cache_clear()
    log.forget()
    modules = {root, f"{root}_impl"}

    def make(name, source=GOOD, entry="FEATURE"):
        module = f"plugin_{name}"
        modules.add(module)
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"corp_{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: corp-{name}\nVersion: 1.2\n")
        value = f"{module}:{entry}" if entry else module
        (info / "entry_points.txt").write_text(f"[{features.ENTRY_POINTS}]\n{name} = {value}\n")

    yield make
    mindspeed_dsa.disable()
    features.plugins.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] in modules]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("source", "entry"),
    [
        (GOOD, "FEATURE"),
        (GOOD, ""),
        (GOOD + "FEATURES = (FEATURE,)\n", "FEATURES"),
        (GOOD + "FEATURES = [FEATURE]\ndel FEATURE\n", ""),
    ],
    ids=["feature", "module", "sequence", "module of several"],
)
def test_it_is_a_feature_like_others(install, source, entry, monkeypatch):
    install("count", source, entry)
    import corp_megatron.core.consumer as consumer

    (feature,) = features.all_features()
    assert feature.distribution == "corp-count 1.2"
    # Switches of Python, of the command line and of the environment.
    for switch_on in (
        lambda: mindspeed_dsa.enable(use_counting=True),
        lambda: session.enable_from_argv(["--use-counting"]),
        lambda: (monkeypatch.setenv("MINDSPEED_DSA_USE_COUNTING", "1"), mindspeed_dsa.enable()),
    ):
        switch_on()
        calls = sys.modules["corp_megatron_impl"].CALLS
        before = len(calls)
        assert consumer.use(3) == 6
        assert len(calls) == before + 1
        mindspeed_dsa.disable()
    parser = mindspeed_dsa.add_arguments(argparse.ArgumentParser())
    assert parser.parse_args(["--use-counting"]).use_counting


def test_commands_name_the_distribution(install, capsys):
    install("count")
    for command in (["features"], ["explain", "--use-counting"]):
        assert main(command) == 0
        assert "counting (plug-in corp-count 1.2)" in capsys.readouterr().out
    report = doctor.examine(["--use-counting"])
    (row,) = report["features"]
    assert (row["name"], row["on"], row["plugin"]) == ("counting", True, "corp-count 1.2")
    assert "counting (corp-count 1.2)" in doctor.as_text(report)


def test_entry_points_are_read_once(install):
    install("count")
    features.all_features()
    # A later distribution is not noticed.
    install("late", GOOD.replace("counting", "late"))
    assert [feature.name for feature in features.all_features()] == ["counting"]


BROKEN = {
    "import": ("import no_such_module\n", "No module named 'no_such_module'"),
    "exit": ("raise SystemExit(3)\n", "SystemExit(3)"),
    "attribute": ("", "has no attribute 'FEATURE'"),
    "kind": ("FEATURE = 3\n", "plugin_bad:FEATURE is 3: an entry point names a Feature"),
    "name": (GOOD, "a feature named 'counting' is declared by corp-a 1.2 already"),
    "service": (
        GOOD.replace('"counting"', '"verify-before-model"'),
        "a feature named 'verify-before-model' is declared by mindspeed_dsa already",
    ),
    "flag": (
        GOOD.replace('"counting"', '"other"').replace('"count calls"', '"count others"'),
        "other: its flag --use-counting means something else in corp-a 1.2",
    ),
    "general flag": (
        GOOD.replace('"counting"', '"other"').replace("--use-counting", "--mindspeed-platform"),
        "other: its flag --mindspeed-platform means something else in mindspeed_dsa",
    ),
    "alias": (
        GOOD.replace('"counting"', '"other"').replace(
            'Flag("--use-counting", "count calls")', 'Flag("--other", "x", aliases=("--use-counting",))'
        ),
        "other: its flag --other means something else in corp-a 1.2, which declares --use-counting",
    ),
    "no flag": (GOOD.replace('"counting"', '"o"').replace('"--use-counting"', '"use-it"'), "start with --"),
    "range": (
        GOOD
        + "from dataclasses import replace\n"
        + 'FEATURE = replace(FEATURE, name="other", requires=Requires(versions={"torch": "2 or so"}))\n',
        "other: '2 or so' is no PEP 440 range",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_named_and_the_others_go_on(install, case, capsys):
    source, words = BROKEN[case]
    install("a")
    install("bad", source)
    install("c", GOOD.replace("counting", "third"))
    assert [feature.name for feature in features.all_features()] == ["counting", "third"]
    (broken,) = features.broken_plugins()
    assert broken.message.startswith("plug-in corp-bad 1.2 (entry point 'bad') cannot be used: ")
    assert words in broken.message
    mindspeed_dsa.enable(use_counting=True, use_third=True)
    assert "corp-bad 1.2" in capsys.readouterr().err, "the job's log says so"
    assert {name for site in mindspeed_dsa.report() for name in site["features"]} >= {"counting", "third"}
    found = doctor.examine([])
    assert found["problems"] == [broken.message]
    assert main(["features"]) == 0
    assert broken.message in capsys.readouterr().out


def test_an_unknown_switch_names_broken_plugins(install, monkeypatch, capsys):
    install("bad", "import no_such_module\n")
    with pytest.raises(SettingsError, match=r"there is no switch 'use_bad'.*plug-in corp-bad 1\.2"):
        mindspeed_dsa.enable(use_bad=True)
    parser = mindspeed_dsa.add_arguments(argparse.ArgumentParser())
    with pytest.raises(SystemExit):
        parser.parse_args(["--use-bad"])
    assert "plug-in corp-bad 1.2" in capsys.readouterr().err
    monkeypatch.setenv("MINDSPEED_DSA_USE_BAD", "1")
    with pytest.raises(SettingsError, match=r"MINDSPEED_DSA_USE_BAD is unknown.*plug-in corp-bad 1\.2"):
        mindspeed_dsa.enable()
    assert main(["explain", "--use-bad"]) == 2
    assert "plug-in corp-bad 1.2" in capsys.readouterr().err


def test_a_known_switch_of_a_broken_plugin_stops_the_run(install):
    # Unknown flags may belong to other programs, but this one is known to be the plug-in's.
    install("a")
    install("bad", GOOD.replace("--use-counting", "--use-bad"))
    session.enable_from_argv(["--use-counting"])
    with pytest.raises(SettingsError, match=r"--use-bad: plug-in corp-bad 1\.2"):
        session.enable_from_argv(["--use-bad"])
    assert session.current().settings.use_counting, "what ran before goes on"


@pytest.mark.parametrize("imported_first", [True, False])
def test_a_target_that_is_not_there_stops_where_the_feature_is_on(install, imported_first):
    install("lost", FEATURE.format(target="scales"))
    if imported_first:
        import corp_megatron.core.layers  # noqa: F401
    mindspeed_dsa.enable()
    with pytest.raises(PatchError) as caught:
        mindspeed_dsa.enable(use_counting=True)
    assert "counting (plug-in corp-lost 1.2)" in str(caught.value)
    assert "scales" in str(caught.value)


def test_a_failing_patch_names_the_distribution(install):
    install("lost", GOOD.replace("corp_megatron_impl:count", "corp_megatron_impl:gone"))
    import corp_megatron.core.layers  # noqa: F401

    with pytest.raises(PatchError, match=r"counting \(plug-in corp-lost 1\.2\): .*gone"):
        mindspeed_dsa.enable(use_counting=True)


@pytest.mark.parametrize("function", ["active", "options", "check"])
def test_a_function_that_raises_names_the_distribution(install, function):
    raising = f"FEATURE = replace(FEATURE, {function}=lambda *given: given[0].no_such)\n"
    install("bad", GOOD + "from dataclasses import replace\n" + raising)
    name = "Feature.is_active" if function == "active" else "<lambda>"
    message = rf"counting \(plug-in corp-bad 1\.2\): its {name} raises .*no_such"
    with pytest.raises(SettingsError, match=message), mindspeed_dsa.enabled(use_counting=True):
        mindspeed_dsa.validate(argparse.Namespace())
    (problem,) = doctor.examine(["--use-counting"])["problems"]
    assert re.search(message, problem)


def test_a_plugin_may_use_a_built_in_flag_of_megatron(install, monkeypatch):
    """A plug-in may declare a Megatron flag that a built-in feature declares with another description."""
    flag = mindspeed_dsa.Flag("--num-experts", "Ours.", kind="value", type=int, megatron=True)
    monkeypatch.setattr(features, "built_in", lambda: (mindspeed_dsa.Feature("ours", "reads it", (flag,)),))
    theirs = 'Flag("--num-experts", "Theirs.", kind="value", type=int, megatron=True)'
    install("a", GOOD.replace('"count calls"),)', f'"count calls"), {theirs})'))
    assert not features.broken_plugins()
    assert mindspeed_dsa.enable(use_counting=True, num_experts=4) is None
