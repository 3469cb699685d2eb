"""Results of the matrix: written by its tests, merged, and shown next to the static verdicts."""

from __future__ import annotations

import csv
import json
from types import SimpleNamespace

import pytest

from mindspeed_dsa.__main__ import main
from mindspeed_dsa.feature import Feature
from mindspeed_dsa.features import shipped
from mindspeed_dsa.patches.drift import TargetFacts
from mindspeed_dsa.patches.errors import MindSpeedDSAError
from mindspeed_dsa.patches.spec import Patch
from mindspeed_dsa.session import records
from mindspeed_dsa.session.records import Development, Records
from mindspeed_dsa.tools.compat import releases, trained
from mindspeed_dsa.tools.compat.trained import Result, Trained
from tests.matrix.record import Record
from tests.support.drift_packages import write

PATCH = Patch("megatron.core.a:f", "wrap", "implementation:f", "a test wants it", versions=">=0.14")
FEATURE = Feature("f", "does f", patches=(PATCH,))
MAIN = Development("0.20.0", "c" * 40, "2026-08-22")
FACTS = TargetFacts(True, params=("x",), fingerprint="a" * 16, defined_in=PATCH.target)
KNOWN = Records({PATCH.target: dict.fromkeys(("0.15.3", "0.16.1", "main"), FACTS)}, MAIN)
RAN = {"python": "3.12.1", "torch": "2.13.0", "mindspeed_dsa": "0.1.0"}


def results(folder, release, version=None, **features):
    content = {"megatron-core": version or release, **RAN, "features": features}
    (folder / f"{release}.json").write_text(json.dumps(content))


def report(outcome, *notes, when="call", message="E   assert 1 == 2"):
    return SimpleNamespace(
        when=when,
        passed=outcome == "passed",
        failed=outcome == "failed",
        user_properties=[("figure", "x"), *(("matrix", list(note)) for note in notes)],
        longrepr=message,
        longreprtext=message,
    )


def test_what_cases_say_is_what_is_written(tmp_path):
    """A failed case has trained nothing, whatever it recorded before."""
    record = Record(tmp_path / "new" / "0.16.1.json")
    about = ("case", "TP2+SP", ["f"], "")
    for entry in (
        report("passed", about, ("trained", "TP2+SP", ["cpu-platform", "f"], "")),
        report("passed", about, ("trained", "TP2+SP", ["f"], ""), when="teardown"),
        report("passed", ("case", "EP2", ["g"], ""), ("refused", "EP2", ["g"], "needs megatron-core >=0.17")),
        report("failed", ("case", "EP2", ["h"], ""), ("trained", "EP2", ["h"], "")),
        report("skipped", ("case", "EP2", ["i"], "")),
    ):
        record.pytest_runtest_logreport(entry)
    record.pytest_sessionfinish(SimpleNamespace(config=SimpleNamespace()))
    content = json.loads((tmp_path / "new" / "0.16.1.json").read_text())
    assert content["features"] == {
        "cpu-platform": {"trained": {"TP2+SP": ""}},
        "f": {"trained": {"TP2+SP": ""}},
        "g": {"refused": {"EP2": "needs megatron-core >=0.17"}},
        "h": {"fails": {"EP2": "E   assert 1 == 2"}},
    }
    assert content["torch"]
    again = Record(tmp_path / "new" / "0.16.1.json")
    again.pytest_runtest_logreport(
        report("passed", ("case", "EP2", ["h"], ""), ("trained", "EP2", ["h"], ""))
    )
    again.pytest_sessionfinish(SimpleNamespace(config=SimpleNamespace()))
    repaired = json.loads((tmp_path / "new" / "0.16.1.json").read_text())
    assert repaired["features"] == {**content["features"], "h": {"trained": {"EP2": ""}}}


@pytest.mark.parametrize(
    ("found", "verdict", "word"),
    [
        ({"trained": {"EP2": ""}}, "fits", "trained"),
        ({"trained": {"EP2": ""}}, "by backport", "trained"),
        ({"trained": {"EP2": ""}}, "not needed", "not needed"),
        ({"trained": {"EP2": ""}, "fails": {"CP2": "no"}}, "fits", "fails: CP2: no"),
        ({"refused": {"EP2": "needs more"}}, "not supported", "refused: needs more"),
        ({}, "fits", "fits, not trained"),
        ({}, "not in this release", "not in this release"),
    ],
)
def test_one_cell(found, verdict, word):
    assert trained.result(found, verdict).word == word


def test_releases_that_ran_replace_what_was_known_and_others_stay(tmp_path):
    results(tmp_path, "0.16.1", f={"trained": {"EP2": "", "TP2+SP": ""}})
    before = Trained({"0.15.3": RAN}, {"f": {"0.15.3": Result("trained", ("EP2",))}})
    table = trained.merge(before, tmp_path, (FEATURE,), KNOWN)
    assert list(table.ran_with) == ["0.15.3", "0.16.1"]
    assert table.of("f", "0.16.1") == Result("trained", ("EP2", "TP2+SP"))
    assert trained.parse(trained.dump(table)) == table
    results(tmp_path, "0.16.1")
    again = trained.merge(table, tmp_path, (FEATURE,), KNOWN)
    assert again.of("f", "0.16.1") == Result("fits, not trained")
    assert again.of("f", "0.15.3") == Result("trained", ("EP2",))


@pytest.mark.parametrize(
    ("before", "found", "after"),
    [
        (Result("trained", ("CP2",)), {}, Result("trained", ("CP2",))),
        (Result("refused: needs more"), {}, Result("refused: needs more")),
        (None, {}, Result("fits, not trained")),
        (Result("trained", ("CP2",)), {"trained": {"EP2": ""}}, Result("trained", ("CP2", "EP2"))),
        (Result("trained", ("CP2",)), {"fails": {"CP2": "no"}}, Result("fails: CP2: no")),
        (Result("fails: CP2: no: it"), {"trained": {"CP2": ""}}, Result("trained", ("CP2",))),
        (Result("fails: CP2: no: it"), {"trained": {"EP2": ""}}, Result("fails: CP2: no: it", ("EP2",))),
        (Result("refused: needs more"), {"trained": {"EP2": ""}}, Result("trained", ("EP2",))),
    ],
)
def test_a_part_of_the_matrix_leaves_the_rest_as_it_was(tmp_path, before, found, after):
    results(tmp_path, "0.16.1", **({"f": found} if found else {}))
    known = Trained({"0.16.1": RAN}, {"f": {"0.16.1": before}} if before else {})
    table = trained.merge(known, tmp_path, (FEATURE,), KNOWN, part=True)
    assert table.of("f", "0.16.1") == after


def test_a_part_that_ran_with_other_versions_than_the_rest_is_refused(tmp_path):
    results(tmp_path, "0.16.1", f={"trained": {"EP2": ""}})
    recorded = Trained({"0.16.1": {**RAN, "torch": "2.12.0"}}, {})
    with pytest.raises(MindSpeedDSAError, match=r"run the whole matrix of 0\.16\.1"):
        trained.merge(recorded, tmp_path, (FEATURE,), KNOWN, part=True)
    assert trained.merge(recorded, tmp_path, (FEATURE,), KNOWN).ran_with == {"0.16.1": RAN}


def test_files_of_another_release_are_refused(tmp_path):
    with pytest.raises(MindSpeedDSAError, match="run make test-matrix"):
        trained.merge(Trained(), tmp_path, (FEATURE,), KNOWN)
    results(tmp_path, "0.16.1", version="0.15.3")
    with pytest.raises(MindSpeedDSAError, match=r"holds results of megatron-core 0\.15\.3"):
        trained.merge(Trained(), tmp_path, (FEATURE,), KNOWN)


def test_the_page_says_trained_only_where_tests_have(tmp_path):
    results(tmp_path, "0.15.3", f={"fails": {"CP2": "it broke"}})
    results(tmp_path, "0.16.1", f={"refused": {"EP2": "runs on npu"}})
    results(tmp_path, "main", version="0.20.0", f={"trained": {"EP2": ""}})
    table = trained.merge(Trained(), tmp_path, (FEATURE,), KNOWN)
    heading, row = csv.reader(releases.compatibility_matrix((FEATURE,), KNOWN, table).splitlines())
    cells = dict(zip(heading, row, strict=True))
    assert cells["feature"] == "f"
    assert cells["0.15.3"] == "fails"
    assert cells["0.16.1"] == "fits"
    assert cells["0.13.1"] == "not in this release"
    assert cells["main, 2026-08-22"] == "trained"
    lacking = releases.exceptions((FEATURE,), KNOWN, table)
    assert lacking.splitlines()[2].startswith("| f | not in this release: 0.12.1 to 0.13.1; not recorded: ")
    assert lacking.endswith("; fails: 0.15.3 |\n")
    page = releases.compatibility((FEATURE,), KNOWN, table)
    assert "* f: fails: CP2: it broke (0.15.3)" in page
    assert "* f: refused: runs on npu (0.16.1)" in page
    assert "| f | EP2 (main) |" in page
    assert "commit `cccccccccccc` of 2026-08-22. This commit declares the version 0.20.0" in page


def test_the_committed_table_is_of_this_version_s_features():
    table = trained.load()
    names = {feature.name for feature in shipped()}
    assert set(table.results) <= names
    assert set(table.ran_with) <= set(records.load().releases)
    for name, by_release in table.results.items():
        for release, each in by_release.items():
            assert not each.word.startswith(trained.FAILS), (name, release, each.word)
            assert bool(each.layouts) == (each.word == trained.TRAINED), (name, release)


def test_diff_tells_what_broke_by_feature(tmp_path, capsys):
    info = "MAJOR = 0\nMINOR = 20\nPATCH = 0\nPRE_RELEASE = ''\n"
    write(tmp_path / "checkout", {"megatron/core/package_info.py": info})
    results(tmp_path, "next", version="0.20.0", **{"step-metrics": {"fails": {"TP2+SP": "KeyError: 'x'"}}})
    arguments = ["diff", str(tmp_path / "checkout"), "--trained", str(tmp_path / "next.json")]
    assert main(arguments) == 1
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert lines["step-metrics"].endswith("fails: TP2+SP: KeyError: 'x'")
    assert "fails: " in lines["recompute-norm"]  # its targets are not in this checkout
    assert lines["accept-mindspeed-flags"].endswith("fits, not trained")  # it patches nothing
    results(tmp_path, "next", version="0.19.0")
    assert main(arguments) == 2
    assert "is of megatron-core 0.19.0" in capsys.readouterr().err


def test_diff_tells_what_is_refused_in_a_release_that_nobody_knows(tmp_path, capsys):
    info = "MAJOR = 0\nMINOR = 21\nPATCH = 0\nPRE_RELEASE = ''\n"
    write(tmp_path / "checkout", {"megatron/core/package_info.py": info})
    results(tmp_path, "next", version="0.21.0")
    main(["diff", str(tmp_path / "checkout"), "--trained", str(tmp_path / "next.json")])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["two-streams"]]
    assert any("refused: it needs megatron-core >=0.16,<0.21" in line for line in lines), lines
