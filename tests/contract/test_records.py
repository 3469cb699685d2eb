"""The committed record of releases covers every feature, and the pages made from it are up to date.

Nothing here needs the network.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil

import pytest
from packaging.specifiers import SpecifierSet

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.features import built_in, shipped
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.drift import TargetFacts
from mindspeed_dsa.patches.spec import Patch
from mindspeed_dsa.session import records
from mindspeed_dsa.session.checks import checker
from mindspeed_dsa.session.records import RELEASES, Development, Records
from mindspeed_dsa.tools.compat import pages, releases
from mindspeed_dsa.tools.compat.trained import Verdict, judge

MEGATRON_PATCHES = [(feature, patch) for feature, patch in records.megatron_patches()]
STALE = "run `make compat` and commit mindspeed_dsa/session/targets.json"


def test_every_target_is_recorded_in_every_release():
    table = records.load()
    unrecorded = {
        (patch.label, release)
        for _, patch in MEGATRON_PATCHES
        for release in table.releases
        if table.of(patch, release) is None
    }
    assert not unrecorded, STALE


def test_no_target_is_recorded_that_nothing_patches():
    patched = {patch.label for _, patch in MEGATRON_PATCHES}
    assert set(records.load().facts) <= patched, STALE


def test_record_agrees_with_the_installed_release():
    release = versions.of_megatron()
    if release not in RELEASES:
        pytest.skip(f"Megatron-core {release} is not a recorded release")
    check = checker()
    table = records.load()
    needed = records.needed_parameters()
    compared = 0
    for _, patch in MEGATRON_PATCHES:
        if not patch.module.startswith("megatron.core"):
            continue
        actual = records.recorded(check.inspect(patch), needed[patch.label])
        known_facts = table.of(patch, release)
        assert known_facts is not None, STALE
        # The reason names the sources that were read.
        assert dataclasses.replace(known_facts, reason=actual.reason) == actual, f"{patch.target}: {STALE}"
        compared += 1
    assert compared > 10


def test_required_patches_apply_to_the_release_that_is_pinned():
    """Every feature that supports the release of constraints.txt finds all of its targets there."""
    verdicts = {feature.name: judge(feature, "0.16.1", records.load()) for feature in built_in()}
    failing = {
        name: verdict for name, verdict in verdicts.items() if verdict.word in ("fails", "not recorded")
    }
    assert not failing
    assert sum(verdict.word == "fits" for verdict in verdicts.values()) > len(verdicts) / 2


def test_no_supported_release_fails():
    """Within the version range of a patch its target must exist, required or not."""
    failing = [
        (feature.name, release, verdict.reason)
        for feature in built_in()
        for release in records.load().releases
        if (verdict := judge(feature, release, records.load())).word == "fails"
    ]
    assert not failing


def test_pages_are_up_to_date():
    assert pages.stale(pages.docs_folder()) == []


def test_version_ranges_can_be_read():
    for feature in built_in():
        for text in (*feature.requires.versions.values(), *(p.versions for p in feature.patches)):
            SpecifierSet(text)


# -- the machinery behind these tests ----------------------------------------------------------

WORKS = TargetFacts(True, params=("x",), fingerprint="a" * 16, defined_in="megatron.core.a:f")
MISSING = TargetFacts(False, reason="there is no module megatron.core.a in this release")


def patch(**fields):
    return Patch("megatron.core.a:f", "wrap", "implementation:f", "a test wants it", **fields)


def record(facts):
    return Records({"megatron.core.a:f": facts})


def test_record_survives_the_file():
    odd = dataclasses.replace(WORKS, params=None, has_var_keyword=True, defined_in="megatron.core.b:g")
    facts = {"0.12.1": MISSING, "0.15.3": odd, "0.16.0": WORKS, "0.16.1": WORKS}
    text = records.dump(record(facts))
    assert records.parse(text) == record(facts)
    groups = json.loads(text)["targets"]["megatron.core.a:f"]
    assert [group["releases"] for group in groups] == [["0.12.1"], ["0.15.3"], ["0.16.0", "0.16.1"]]


def test_main_comes_after_all_releases():
    main = Development("0.20.0", "c" * 40, "2026-08-22")
    written = Records({"megatron.core.a:f": {"main": WORKS, "0.19.0": WORKS}}, main)
    assert records.parse(records.dump(written)) == written
    (group,) = json.loads(records.dump(written))["targets"]["megatron.core.a:f"]
    assert group["releases"] == ["0.19.0", "main"]
    assert written.releases == (*RELEASES, "main")
    feature = Feature(
        "f", "does f", patches=(patch(),), requires=Requires(versions={"megatron-core": "<0.20"})
    )
    assert judge(feature, "main", written).word == "not supported"
    assert judge(dataclasses.replace(feature, requires=Requires()), "main", written).word == "fits"


def test_record_leaves_out_where_a_definition_stands():
    """Otherwise a shifted line would split a group of equal releases."""
    moved = dataclasses.replace(WORKS, line=3, file="a.py")
    assert records.recorded(moved, frozenset("x")) == WORKS
    assert records.recorded(WORKS, frozenset()).params == ()


@pytest.mark.parametrize(
    ("facts", "fields", "needs", "word"),
    [
        (WORKS, {}, "", "fits"),
        (WORKS, {"params": ("x",)}, "", "fits"),
        (WORKS, {"params": ("y",)}, "", "fails"),
        (WORKS, {"params": ("y",), "required": False}, "", "fails"),
        (MISSING, {}, "", "fails"),
        (MISSING, {"required": False}, "", "fails"),
        (MISSING, {"required": False, "versions": "<0.16"}, "", "not needed"),
        (None, {"required": False}, "", "not recorded"),
        (None, {}, "", "not recorded"),
        (MISSING, {"versions": ">=0.17"}, "", "not in this release"),
        (MISSING, {"versions": ">=0.14,<0.16"}, "", "not needed"),
        (MISSING, {"versions": ">=0.16,<0.17"}, "", "fails"),
        (WORKS, {}, ">=0.17", "not in this release"),
        (WORKS, {}, ">=0.14,<0.16", "not supported"),
    ],
)
def test_verdicts(facts, fields, needs, word):
    requires = Requires(versions={"megatron-core": needs} if needs else {})
    feature = Feature("f", "does f", patches=(patch(**fields),), requires=requires)
    found = judge(feature, "0.16.1", record({"0.16.1": facts} if facts else {}))
    assert found.word == word
    assert bool(found.reason) == (word in ("fails", "not recorded", "not supported"))


def test_feature_that_patches_other_packages_too_still_works_outside_the_range():
    other = Patch("torch.cuda:f", "wrap", "implementation:f", "a test wants it")
    feature = Feature("f", "does f", patches=(patch(versions="<0.16"), other))
    assert judge(feature, "0.16.1", record({})) == Verdict("fits")


def test_what_a_backport_supplies():
    """Only if the backport itself works, and the feature may be enabled."""
    facts = {"0.15.3": WORKS, "0.16.1": WORKS}
    backport = Feature("old", "brings it", patches=(patch(versions=">=0.14,<0.16"),), supplies=("f",))
    feature = Feature("f", "does f", patches=(patch(versions=">=0.16"),))
    words = {
        release: judge(feature, release, record(facts), (backport,))
        for release in ("0.13.1", "0.15.3", "0.16.1")
    }
    assert words == {
        "0.13.1": Verdict("not in this release"),
        "0.15.3": Verdict("by backport", backport="old"),
        "0.16.1": Verdict("fits"),
    }
    needy = dataclasses.replace(feature, requires=Requires(versions={"megatron-core": ">=0.16"}))
    assert judge(needy, "0.15.3", record(facts), (backport,)).word == "not in this release"
    other = dataclasses.replace(backport, supplies=("g",))
    assert judge(feature, "0.15.3", record(facts), (other,)).word == "not in this release"
    served = (dataclasses.replace(backport, doc="old.md"), feature)
    _, *rows = csv.reader(releases.compatibility_matrix(served, record(facts)).splitlines())
    _, *words = next(row for row in rows if row[0] == "f")
    cells = dict(zip(RELEASES, words, strict=True))
    assert cells["0.15.3"] == "by old"
    assert cells["0.13.1"] == "not in this release"


def test_what_backports_of_ours_supply_is_there():
    names = {feature.name for feature in built_in()}
    supplied = {name for feature in built_in() for name in feature.supplies}
    assert supplied
    assert supplied <= names
    words = {
        release: {
            name: judge(f, release, records.load(), built_in()).word for f in built_in() if (name := f.name)
        }
        for release in ("0.12.1", "0.15.3", "0.16.1")
    }
    for name in supplied:
        found = [words[release][name] for release in ("0.12.1", "0.15.3", "0.16.1")]
        assert found == ["by backport", "by backport", "fits"], name


@pytest.mark.parametrize(
    ("ranges", "both"),
    [
        (("", ""), ""),
        ((">=0.16,<0.17", ""), ">=0.16,<0.17"),
        (("", ">=0.16,<0.20"), ">=0.16,<0.20"),
        ((">=0.16,<0.17", ">=0.12.1,<0.19"), ">=0.16,<0.17"),
        ((">=0.12.1,<0.19", ">=0.9"), ">=0.12.1,<0.19"),
        ((">=0.16", ">0.16"), ">0.16"),
        (("<0.17", "<=0.17,!=0.16.2"), "!=0.16.2,<0.17"),
    ],
)
def test_intersection_of_ranges(ranges, both):
    assert pages.intersection(*ranges) == both


def test_tables_of_patches_print_where_a_row_applies():
    """A row without its own range applies no further than its feature may be enabled."""
    requires = Requires(versions={"megatron-core": ">=0.16,<0.17"})
    other = Patch("torch.cuda:f", "wrap", "implementation:f", "a test wants it", versions=">=2.6")
    feature = Feature("f", "does f", patches=(patch(), patch(versions=">=0.14"), other), requires=requires)
    column = [line.split(" | ")[2] for line in pages.patched_tables((feature,)).splitlines()[2:]]
    assert column == ["`>=0.16,<0.17`", "`>=0.16,<0.17`, torch `>=2.6`"]
    free = dataclasses.replace(feature, requires=Requires())
    column = [line.split(" | ")[2] for line in pages.patched_tables((free,)).splitlines()[2:]]
    assert column == ["all", "`>=0.14`", "all, torch `>=2.6`"]


def test_rows_that_differ_in_their_targets_alone_are_one():
    """Only neighbours are merged, so that rows stay in the order of the declaration."""
    first, other = patch(), Patch("megatron.core.b:g", "replace", "implementation:g", "a test wants it")
    rows = (first, dataclasses.replace(first, target="megatron.core.c:h"), other, first)
    table = pages.patched_tables((Feature("f", "does f", patches=rows),)).splitlines()[2:]
    assert [line.split(" | ")[0] for line in table] == [
        "| `megatron.core.a:f`, `megatron.core.c:h`",
        "| `megatron.core.b:g`",
        "| `megatron.core.a:f`",
    ]


def test_every_row_applies_to_some_release():
    """A row outside of its feature's own range would never apply."""
    known, never = records.load(), []
    served = [known.version(release) for release in known.releases]
    for feature, patch in MEGATRON_PATCHES:
        needed = feature.requires.versions.get("megatron-core", "")
        both = SpecifierSet(pages.intersection(needed, patch.versions))
        if not any(both.contains(release, prereleases=True) for release in served):
            never.append((feature.name, patch.label, str(both)))
    assert not never


def test_the_index_lists_switches_by_kind():
    """The index shows the words that a user writes, or that none are needed."""
    flags = (
        Flag("--a", "Fuse.", kind="auto"),
        Flag("--num-experts", "Megatron's.", kind="value", megatron=True),
    )
    features = (
        Feature("one", "does one thing", flags, doc="page.md"),
        Feature("two", "does two things", flags[1:]),
        Feature("three", "does three things"),
    )
    text = pages.index({"moe": features[:2], "": features[2:]})
    assert text.index("## Mixture of experts") < text.index("[one]") < text.index("always on")
    assert "| [one](page.md) | `--a`, automatic | does one thing |" in text
    assert "| two | `--num-experts` (Megatron's) | does two things |" in text
    assert "| three | automatic | does three things |" in text


def test_pages_and_records_hold_what_is_shipped_alone(monkeypatch):
    """Installed plug-ins do not change the generated pages."""
    foreign = Feature("foreign", "a plug-in's", patches=(patch(),), distribution="corp 1.0")
    monkeypatch.setattr("mindspeed_dsa.features.all_features", lambda: (*built_in(), foreign))
    assert foreign not in shipped()
    assert "foreign" not in releases.compatibility_matrix(shipped(), records.load())
    assert all(feature is not foreign for feature, _ in records.megatron_patches())


def test_stale_and_missing_pages_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "shipped", lambda: (Feature("f", "does f", doc="f.md"),))
    assert pages.stale(tmp_path) == [
        "compatibility.md is out of date; run make docs",
        "compatibility.csv is out of date; run make docs",
        "README.md is out of date; run make docs",
        "  - write docs/npu.md",
        "  - write docs/design/npu.md",
        "  - write docs/support.md",
        "  - write docs/design/environment.md",
        "  - write docs/zh/translations.json",
        "  - write docs/design/beside.md",
        "  - write docs/features/f.md for f",
    ]
    (tmp_path / "design").mkdir()
    (tmp_path / "design" / "npu.md").write_text("<!-- operators:begin -->\n<!-- operators:end -->\n")
    assert any("products:begin" in text for text in pages.stale(tmp_path))
    for name in ("npu.md", "design/npu.md", "migrate.md", "support.md"):
        shutil.copy(pages.docs_folder() / name, tmp_path / name)
    shutil.copytree(pages.docs_folder() / "zh", tmp_path / "zh")
    (tmp_path / "design" / "environment.md").write_text("<!-- checks:begin -->\n<!-- checks:end -->\n")
    shutil.copy(pages.docs_folder() / "design" / "beside.md", tmp_path / "design")
    page = tmp_path / "features" / "f.md"
    page.parent.mkdir()
    page.write_text("# F\n\n<!-- patched:begin -->old<!-- patched:end -->\n\nLimits\n")
    assert any("flags:begin" in text for text in pages.stale(tmp_path))
    page.write_text(
        "# F\n<!-- flags:begin --><!-- flags:end -->\n<!-- patched:begin -->old<!-- patched:end -->\nEnd\n"
    )
    assert pages.stale(tmp_path)
    written = {"compatibility.md", "compatibility.csv", "support.md", "README.md", "environment.md", "f.md"}
    assert {path.name for path in pages.write_all(tmp_path)} == written
    assert pages.stale(tmp_path) == []
    text = page.read_text()
    assert "old" not in text
    assert text.endswith("<!-- patched:end -->\nEnd\n")
    page.write_text(text.replace("Nothing is patched", "Much is patched"))
    assert pages.stale(tmp_path) == ["f.md is out of date; run make docs"]
