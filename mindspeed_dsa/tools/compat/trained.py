"""Trained features: results of ``make test-matrix``, by feature and release.

``trained.json`` in this folder is put together from the files that the tests write, one for each release.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from mindspeed_dsa.feature import Feature
from mindspeed_dsa.patches.errors import MindSpeedDSAError
from mindspeed_dsa.session.records import Records
from mindspeed_dsa.tools.compat.verdicts import judge

FILE = Path(__file__).with_name("trained.json")
TRAINED, REFUSED, FAILS, FITS_ONLY = "trained", "refused", "fails", "fits, not trained"


@dataclass(frozen=True)
class Result:
    """One feature on one release.

    Attributes:
        word: ``trained``, ``refused: REASON``, ``fails: REASON``, ``fits, not trained``, or the static
            verdict.
        layouts: in which it trained.
    """

    word: str
    layouts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trained:
    """The committed table.

    Attributes:
        ran_with: by release, the versions of what it ran with: ``python``, ``torch``, ``mindspeed_dsa``.
        results: by feature, then by release.
    """

    ran_with: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    results: Mapping[str, Mapping[str, Result]] = field(default_factory=dict)

    def of(self, feature: str, release: str) -> Result | None:
        """``None`` where the matrix has not run, or did not know the feature yet."""
        return self.results.get(feature, {}).get(release)


@cache
def load() -> Trained:
    """The table shipped with this version of the library."""
    return parse(FILE.read_text(encoding="utf-8")) if FILE.exists() else Trained()


def parse(text: str) -> Trained:
    """Read what :func:`dump` wrote."""
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
    """JSON with one line for each feature and release."""
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


def merge(previous: Trained, folder: Path, features: Iterable[Feature], records: Records) -> Trained:
    """The table with the releases whose files lie in a folder, ``RELEASE.json``; the others stay.

    Raises:
        MindSpeedDSAError: there is none, or one is of no recorded release, or of another than its name says.
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
    shipped = tuple(features)
    order = [r for r in records.releases if r in files or r in previous.ran_with]
    ran_with = {
        release: {name: files[release][name] for name in ("python", "torch", "mindspeed_dsa")}
        if release in files
        else previous.ran_with[release]
        for release in order
    }
    results: dict[str, dict[str, Result]] = {}
    for feature in shipped:
        for release in order:
            kept = previous.of(feature.name, release)
            if release in files:
                found = files[release]["features"].get(feature.name, {})
                kept = result(found, judge(feature, release, records, shipped).word)
            if kept is not None:
                results.setdefault(feature.name, {})[release] = kept
    return Trained(ran_with, results)


def result(found: Mapping[str, Mapping[str, str]], verdict: str) -> Result:
    """Return what a release's cases say about a feature.

    Args:
        found: ``trained``, ``refused`` and ``fails`` to layouts, each with its reason.
        verdict: the static one.
    """
    if failed := found.get(FAILS):
        layout, reason = next(iter(failed.items()))
        return Result(f"{FAILS}: {layout}: {reason}", tuple(found.get(TRAINED, ())))
    if TRAINED in found and verdict in ("fits", "by backport"):
        return Result(TRAINED, tuple(found[TRAINED]))
    if refused := found.get(REFUSED):
        return Result(f"{REFUSED}: {next(iter(refused.values()))}")
    return Result(FITS_ONLY if verdict in ("fits", "by backport") else verdict)
