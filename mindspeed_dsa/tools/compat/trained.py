"""Results of ``make test-matrix`` by feature and Megatron-core release, and verdicts without a test run.

``trained.json`` in this folder is merged from the result files of the tests, one per release.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mindspeed_dsa.feature import Feature
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.drift import assess
from mindspeed_dsa.patches.errors import MindSpeedDSAError
from mindspeed_dsa.patches.versions import MEGATRON_DISTRIBUTION
from mindspeed_dsa.session.records import ROOT, Records

Word = Literal[
    "fits", "by backport", "not needed", "not in this release", "not supported", "fails", "not recorded"
]


@dataclass(frozen=True)
class Verdict:
    """Static verdict: one cell of the compatibility table, found by checks of source code only.

    Attributes:
        word: text of the table's cell, such as ``fits`` or ``not supported``.
        reason: description of the problem.
        backport: name of the backport that provides the feature in this release.
    """

    word: Word
    reason: str = ""
    backport: str = ""


def judge(feature: Feature, release: str, records: Records, others: Iterable[Feature] = ()) -> Verdict:
    """Return the static verdict on a feature for a recorded release of Megatron-core.

    * Release outside of the feature's own version requirement: the feature cannot be enabled.
    * Release older than the patches' version ranges: it lacks the code that the feature changes, unless a
      backport among ``others`` provides it.
    * Release newer than these ranges: the feature is not needed, as Megatron has the change itself.
    * Else the feature fits if every patch target exists. Optional targets count too, because without them
      the feature would lack a part of its effect.
    """
    version = records.version(release)
    required = feature.requires.versions.get(MEGATRON_DISTRIBUTION, "")
    if required and not SpecifierSet(required).contains(version, prereleases=True):
        if _is_below(version, required):
            return Verdict("not in this release")
        return Verdict("not supported", f"it needs Megatron-core {required}")
    patches = [patch for patch in feature.patches if patch.module.partition(".")[0] == ROOT]
    inside = [patch for patch in patches if not versions.outside(patch, lambda package: version)]
    # Optional patches of other packages serve models that these packages build on Megatron.
    elsewhere = any(patch.required for patch in feature.patches if patch not in patches)
    if patches and not inside and not elsewhere:
        # The release is above the range of some patch, so it has the change itself.
        if not all(_is_below(version, patch.versions) for patch in patches):
            return Verdict("not needed")
        for other in others:
            if feature.name in other.supplies and judge(other, release, records).word == "fits":
                return Verdict("by backport", backport=other.name)
        return Verdict("not in this release")
    problems = []
    for patch in inside:
        facts = records.of(patch, release)
        if facts is None:
            return Verdict("not recorded", f"{patch.target} was not read in {release}")
        problems += [f.message for f in assess(patch, facts) if f.fatal]
    return Verdict("fails", "; ".join(problems)) if problems else Verdict("fits")


def _is_below(release: str, specifiers: str) -> bool:
    """Return whether a release is older than the version range ``specifiers``."""
    lower = [s for s in SpecifierSet(specifiers) if s.operator in (">=", ">", "~=", "==")]
    return any(Version(release) < Version(s.version.removesuffix(".*")) for s in lower)


FILE = Path(__file__).with_name("trained.json")
_VERSIONS = ("python", "torch", "mindspeed_dsa")
TRAINED, REFUSED, FAILS, FITS_ONLY = "trained", "refused", "fails", "fits, not trained"


@dataclass(frozen=True)
class Result:
    """Test result of one feature with one release.

    Attributes:
        word: ``trained``, ``refused: REASON``, ``fails: REASON``, ``fits, not trained``, or the static
            verdict.
        layouts: parallel layouts with which training succeeded.
    """

    word: str
    layouts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trained:
    """Test results of all features in all releases, as stored in ``trained.json``.

    Attributes:
        ran_with: dict from release to the versions of ``python``, ``torch`` and ``mindspeed_dsa`` in its
            tests.
        results: dict from feature to a dict from release to result.
    """

    ran_with: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    results: Mapping[str, Mapping[str, Result]] = field(default_factory=dict)

    def of(self, feature: str, release: str) -> Result | None:
        """Return a result, or None if the matrix has not run with this release and feature."""
        return self.results.get(feature, {}).get(release)


@cache
def load() -> Trained:
    """Return the table of this version of the library."""
    return parse(FILE.read_text(encoding="utf-8")) if FILE.exists() else Trained()


def parse(text: str) -> Trained:
    """Parse the text written by :func:`dump`."""
    content = json.loads(text)
    return Trained(
        content["releases"],
        {
            feature: {
                release: Result(each["result"], tuple(each.get("layouts", ())))
                for release, each in results.items()
            }
            for feature, results in content["features"].items()
        },
    )


def dump(table: Trained) -> str:
    """Return JSON with one line per feature and release."""
    releases = [f"  {json.dumps(release)}: {json.dumps(with_)}" for release, with_ in table.ran_with.items()]
    features = []
    for feature, results in table.results.items():
        lines = [
            f"   {json.dumps(release)}: {json.dumps(_to_json(each))}" for release, each in results.items()
        ]
        features.append(f"  {json.dumps(feature)}: {{\n" + ",\n".join(lines) + "\n  }")
    return (
        '{\n "releases": {\n'
        + ",\n".join(releases)
        + '\n },\n "features": {\n'
        + ",\n".join(features)
        + "\n }\n}\n"
    )


def _to_json(result: Result) -> dict[str, Any]:
    return {"result": result.word, **({"layouts": list(result.layouts)} if result.layouts else {})}


def merge(
    previous: Trained, folder: Path, features: Iterable[Feature], records: Records, part: bool = False
) -> Trained:
    """Return the table with the results of the files ``RELEASE.json`` in a folder; other releases are kept.

    Args:
        previous: existing table.
        folder: folder with the files.
        features: features of the table.
        records: record of releases.
        part: whether only a part of the matrix ran, so that earlier results of the rest are kept.

    Raises:
        MindSpeedDSAError: the folder has no file, a file is for an unrecorded release or not for the one in
            its name, or a part ran with other versions than the rest.
    """
    files = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")}
    if not files:
        raise MindSpeedDSAError(f"mindspeed_dsa: no results of the matrix in {folder}; run make test-matrix")
    for release, content in files.items():
        if release not in records.releases or content["megatron-core"] != records.version(release):
            raise MindSpeedDSAError(
                f"mindspeed_dsa: {folder / release}.json holds results of megatron-core "
                f"{content['megatron-core']}; recorded are {', '.join(records.releases)}"
            )
        ran_with = {name: content[name] for name in _VERSIONS}
        if part and previous.ran_with.get(release, ran_with) != ran_with:
            raise MindSpeedDSAError(
                f"mindspeed_dsa: {folder / release}.json is a part that ran with {ran_with}, and the "
                f"rest of the table with {previous.ran_with[release]}; run the whole matrix of {release}"
            )
    shipped = tuple(features)
    order = [r for r in records.releases if r in files or r in previous.ran_with]
    ran_with = {
        release: {name: files[release][name] for name in _VERSIONS}
        if release in files
        else previous.ran_with[release]
        for release in order
    }
    results: dict[str, dict[str, Result]] = {}
    for feature in shipped:
        for release in order:
            kept = previous.of(feature.name, release)
            if release in files:
                cases = files[release]["features"].get(feature.name, {})
                # Layouts of this release that did not run again keep their results.
                if part and kept is not None:
                    cases = _beside(cases, kept)
                if cases or not part or kept is None:
                    kept = result(cases, judge(feature, release, records, shipped).word)
            if kept is not None:
                results.setdefault(feature.name, {})[release] = kept
    return Trained(ran_with, results)


def _beside(found: Mapping[str, Mapping[str, str]], earlier: Result) -> dict[str, dict[str, str]]:
    """Return the new test cases, plus the earlier results of layouts that did not run again."""
    again = {layout for layouts in found.values() for layout in layouts}
    together = {what: dict(layouts) for what, layouts in found.items()}
    if not again:
        return together
    trained = {layout: "" for layout in earlier.layouts if layout not in again}
    together[TRAINED] = dict(sorted({**trained, **together.get(TRAINED, {})}.items()))
    word, _, why = earlier.word.partition(": ")
    layout, _, reason = why.partition(": ")
    if word == FAILS and layout not in again:
        together[FAILS] = {layout: reason, **together.get(FAILS, {})}
    return {what: layouts for what, layouts in together.items() if layouts}


def result(found: Mapping[str, Mapping[str, str]], verdict: str) -> Result:
    """Combine the test cases of one feature in one release into a result.

    Args:
        found: dict from ``trained``, ``refused`` and ``fails`` to a dict from layout to reason.
        verdict: static verdict.
    """
    # One failed layout outweighs others that trained; those are listed all the same.
    if failed := found.get(FAILS):
        layout, reason = next(iter(failed.items()))
        return Result(f"{FAILS}: {layout}: {reason}", tuple(found.get(TRAINED, ())))
    if TRAINED in found and verdict in ("fits", "by backport"):
        return Result(TRAINED, tuple(found[TRAINED]))
    if refused := found.get(REFUSED):
        return Result(f"{REFUSED}: {next(iter(refused.values()))}")
    return Result(FITS_ONLY if verdict in ("fits", "by backport") else verdict)
