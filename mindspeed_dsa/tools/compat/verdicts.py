"""Verdicts: does a feature work with a release, by the record alone?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mindspeed_dsa.feature import Feature
from mindspeed_dsa.patches import version_ranges
from mindspeed_dsa.patches.drift import assess
from mindspeed_dsa.patches.versions import MEGATRON_DISTRIBUTION
from mindspeed_dsa.session.records import ROOT, Records

Word = Literal[
    "fits", "by backport", "not needed", "not in this release", "not supported", "fails", "not recorded"
]


@dataclass(frozen=True)
class Verdict:
    """One cell of the compatibility table, with the reason if it needs one.

    Attributes:
        word: the verdict.
        reason: the problem.
        backport: the feature that has this one's effect in the release.
    """

    word: Word
    reason: str = ""
    backport: str = ""


def judge(feature: Feature, release: str, records: Records, others: Iterable[Feature] = ()) -> Verdict:
    """Static verdict on one feature with one of the recorded releases of Megatron-core.

    A release below the ranges of the patches lacks the code that the feature changes, unless one of the
    ``others`` is a backport that provides the feature's effect there. A release above a patch's range
    includes the change itself. Outside the feature's own requirement it cannot be enabled at all.
    """
    version = records.version(release)
    required = feature.requires.versions.get(MEGATRON_DISTRIBUTION, "")
    if required and not SpecifierSet(required).contains(version, prereleases=True):
        if _is_below(version, required):
            return Verdict("not in this release")
        return Verdict("not supported", f"it needs Megatron-core {required}")
    patches = [patch for patch in feature.patches if patch.module.partition(".")[0] == ROOT]
    inside = [patch for patch in patches if not version_ranges.outside(patch, lambda package: version)]
    if patches and not inside and len(patches) == len(feature.patches):
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
            if patch.required:
                return Verdict("not recorded", f"{patch.target} was not read in {release}")
            continue
        problems += [f.message for f in assess(patch, facts) if f.fatal and patch.required]
    return Verdict("fails", "; ".join(problems)) if problems else Verdict("fits")


def _is_below(release: str, specifiers: str) -> bool:
    """Return whether a release outside the range is older than the range."""
    lower = [s for s in SpecifierSet(specifiers) if s.operator in (">=", ">", "~=", "==")]
    return any(Version(release) < Version(s.version.removesuffix(".*")) for s in lower)
