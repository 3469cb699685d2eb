"""Record of patch targets, kept in the repository: parameters and fingerprints per Megatron-core release."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from mindspeed_dsa.feature import Feature
from mindspeed_dsa.features import shipped
from mindspeed_dsa.patches.drift import KnownSources, TargetFacts
from mindspeed_dsa.patches.spec import Patch

FILE = Path(__file__).with_name("targets.json")

RELEASES = (
    "0.12.1",
    "0.12.3",
    "0.13.0",
    "0.13.1",
    "0.14.0",
    "0.15.3",
    "0.16.0",
    "0.16.1",
    "0.17.1",
    "0.18.0",
    "0.18.2",
    "0.19.0",
    "0.19.2",
)
"""Recorded releases of Megatron-core, oldest first."""

MAIN = "main"
"""Key of Megatron-LM's development branch in the record, treated as a release after all others."""

ROOT = "megatron"


@dataclass(frozen=True)
class Development:
    """Commit of Megatron-LM's development branch.

    Attributes:
        version: release that its sources declare.
        commit: commit hash.
        date: commit date, ``YYYY-MM-DD``.
    """

    version: str
    commit: str
    date: str


@dataclass(frozen=True)
class Records:
    """Recorded facts about every patch target in every release; the branch :data:`MAIN` may count as one."""

    facts: Mapping[str, Mapping[str, TargetFacts]]
    main: Development | None = None

    @property
    def releases(self) -> tuple[str, ...]:
        """Recorded releases, oldest first."""
        return RELEASES if self.main is None else (*RELEASES, MAIN)

    def version(self, release: str) -> str:
        """Return the version number that a release's sources declare."""
        return self.main.version if self.main is not None and release == MAIN else release

    def of(self, patch: Patch, release: str) -> TargetFacts | None:
        """Return the facts about a patch's target in a release, or ``None`` if they are not recorded."""
        return self.facts.get(patch.label, {}).get(release)

    def fingerprints(self) -> KnownSources:
        """Return the targets' fingerprints, with which the drift check compares the installed sources."""
        return {
            target: {release: facts.fingerprint for release, facts in by_release.items() if facts.fingerprint}
            for target, by_release in self.facts.items()
        }


@cache
def load() -> Records:
    """Return the record shipped with this version of the library."""
    return parse(FILE.read_text(encoding="utf-8"))


def parse(text: str) -> Records:
    """Parse the output of :func:`dump`."""
    facts: dict[str, dict[str, TargetFacts]] = {}
    content = json.loads(text)
    for target, groups in content["targets"].items():
        facts[target] = {
            release: _from_json(target, group) for group in groups for release in group["releases"]
        }
    main = content.get(MAIN)
    return Records(facts, Development(**main) if main else None)


def dump(records: Records) -> str:
    """Format as JSON, with one line for each group of releases that have the same facts about a target."""
    targets = []
    for target, by_release in sorted(records.facts.items()):
        # Facts are hashable, so releases with equal facts fall into one group.
        groups: dict[TargetFacts, list[str]] = {}
        for release in _in_order(by_release):
            groups.setdefault(by_release[release], []).append(release)
        lines = [
            json.dumps({"releases": names, **_to_json(target, facts)}) for facts, names in groups.items()
        ]
        targets.append(f" {json.dumps(target)}: [\n  " + ",\n  ".join(lines) + "\n ]")
    main = f'"{MAIN}": {json.dumps(asdict(records.main))},\n' if records.main else ""
    return "{" + main + '"targets": {\n' + ",\n".join(targets) + "\n}}\n"


def megatron_patches(features: Iterable[Feature] | None = None) -> Iterator[tuple[Feature, Patch]]:
    """Yield ``(feature, patch)`` for every patch whose target is in Megatron."""
    for feature in shipped() if features is None else features:
        for patch in feature.patches:
            if patch.module.partition(".")[0] == ROOT:
                yield feature, patch


def needed_parameters(features: Iterable[Feature] | None = None) -> dict[str, frozenset[str]]:
    """Return a dict from target label to the parameters that its patches rely on."""
    needed: dict[str, frozenset[str]] = {}
    for _, patch in megatron_patches(features):
        needed[patch.label] = needed.get(patch.label, frozenset()) | frozenset(patch.params)
    return needed


def recorded(facts: TargetFacts, needed: frozenset[str]) -> TargetFacts:
    """Return the facts to record: only the ``needed`` parameters, and no file or line."""
    params = None if facts.params is None else tuple(name for name in facts.params if name in needed)
    # Positions change with every release and would make all facts differ.
    return replace(facts, params=params, file="", line=0)


def _in_order(releases: Iterable[str]) -> list[str]:
    return sorted(releases, key=(*RELEASES, MAIN).index)


def _to_json(target: str, facts: TargetFacts) -> dict[str, Any]:
    if not facts.exists:
        return {"exists": facts.exists, "reason": facts.reason}
    content: dict[str, Any] = {"params": None if facts.params is None else list(facts.params)}
    if facts.has_var_keyword:
        content["var_keyword"] = True
    content["fingerprint"] = facts.fingerprint
    if facts.defined_in != target:
        content["defined_in"] = facts.defined_in
    return content


def _from_json(target: str, group: Mapping[str, Any]) -> TargetFacts:
    params = group.get("params")
    return TargetFacts(
        exists=group.get("exists", True),
        reason=group.get("reason", ""),
        params=None if params is None else tuple(params),
        has_var_keyword=group.get("var_keyword", False),
        fingerprint=group.get("fingerprint", ""),
        defined_in=group.get("defined_in", target if group.get("exists", True) else ""),
    )
