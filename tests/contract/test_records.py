"""The committed record of releases covers every feature, and the pages made from it are up to date.

Nothing here needs the network.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
from packaging.specifiers import SpecifierSet

from mindspeed_dsa import versions
from mindspeed_dsa.compat import checker, pages, records
from mindspeed_dsa.compat.records import RELEASES, Records
from mindspeed_dsa.compat.verdicts import Verdict, judge
from mindspeed_dsa.features import all_features
from mindspeed_dsa.declarations import Feature, Requires
from mindspeed_dsa.patches.drift import TargetFacts
from mindspeed_dsa.patches.spec import Patch

MEGATRON_PATCHES = [(feature, patch) for feature, patch in records.megatron_patches()]
STALE = "run `make compat` and commit mindspeed_dsa/compat/targets.json"


def test_every_target_is_recorded_in_every_release():
    known = records.load()
    unrecorded = {
        (patch.label, release)
        for _, patch in MEGATRON_PATCHES
        for release in RELEASES
        if known.of(patch, release) is None and not patch.module.startswith("megatron.legacy")
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
    known = records.load()
    compared = 0
    for _, patch in MEGATRON_PATCHES:
        if not patch.module.startswith("megatron.core"):
            continue
        found = check.inspect(patch)
        recorded = known.of(patch, release)
        assert recorded is not None, STALE
        assert (recorded.exists, recorded.params, recorded.fingerprint, recorded.defined_in) == (
            found.exists,
            found.params,
            found.fingerprint,
            found.defined_in,
        ), f"{patch.target}: {STALE}"
        compared += 1
    assert compared > 10


def test_required_patches_apply_to_the_release_that_is_pinned():
    """Every feature that supports the release of constraints.txt finds all that it needs there."""
    verdicts = {feature.name: judge(feature, "0.16.1", records.load()) for feature in all_features()}
    failing = {
        name: verdict for name, verdict in verdicts.items() if verdict.word in ("fails", "not recorded")
    }
    assert not failing
    assert sum(verdict.word == "works" for verdict in verdicts.values()) > len(verdicts) / 2


def test_no_supported_release_fails():
    """A range says where a patch applies: inside it, its target must be there."""
    failing = [
        (feature.name, release, verdict.reason)
        for feature in all_features()
        for release in RELEASES
        if (verdict := judge(feature, release, records.load())).word == "fails"
    ]
    assert not failing


def test_pages_are_up_to_date():
    assert pages.stale(pages.docs_folder()) == []


def test_version_ranges_can_be_read():
    for feature in all_features():
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


def test_record_leaves_out_where_a_definition_stands():
    """Otherwise a shifted line would split a group of equal releases."""
    facts = {"0.16.0": dataclasses.replace(WORKS, line=3, file="a.py"), "0.16.1": WORKS}
    assert len(json.loads(records.dump(record(facts)))["targets"]["megatron.core.a:f"]) == 1


@pytest.mark.parametrize(
    ("facts", "fields", "needs", "word"),
    [
        (WORKS, {}, "", "works"),
        (WORKS, {"params": ("x",)}, "", "works"),
        (WORKS, {"params": ("y",)}, "", "fails"),
        (WORKS, {"params": ("y",), "required": False}, "", "works"),
        (MISSING, {}, "", "fails"),
        (MISSING, {"required": False}, "", "works"),
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
    assert judge(feature, "0.16.1", record({})) == Verdict("works")


def test_stale_and_missing_pages_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "all_features", lambda: (Feature("f", "does f", doc="f.md"),))
    assert pages.stale(tmp_path) == [
        "compatibility.md is out of date; run make docs",
        "  - write docs/features/f.md for f",
    ]
    page = tmp_path / "features" / "f.md"
    page.parent.mkdir()
    page.write_text("# F\n\n<!-- patched:begin -->old<!-- patched:end -->\n\nLimits\n")
    assert any("flags:begin" in text for text in pages.stale(tmp_path))
    page.write_text(
        "# F\n<!-- flags:begin --><!-- flags:end -->\n<!-- patched:begin -->old<!-- patched:end -->\nEnd\n"
    )
    assert pages.stale(tmp_path)
    assert {path.name for path in pages.write_all(tmp_path)} == {"compatibility.md", "f.md"}
    assert pages.stale(tmp_path) == []
    text = page.read_text()
    assert "old" not in text
    assert text.endswith("<!-- patched:end -->\nEnd\n")
    page.write_text(text.replace("Nothing is patched", "Much is patched"))
    assert pages.stale(tmp_path) == ["f.md is out of date; run make docs"]
