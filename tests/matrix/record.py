"""What the matrix has found on one release: which feature trained in which layout, was refused, or failed.

Cases say what they are about with the fixture ``note``. Where ``MATRIX_RECORD`` names a file, what came out
of them is written there: results are never typed.
"""

from __future__ import annotations

import json
import platform
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

import mindspeed_dsa
from mindspeed_dsa import features as catalogue
from mindspeed_dsa import session
from mindspeed_dsa.feature import Feature
from mindspeed_dsa.patches import versions
from mindspeed_dsa.session import records
from mindspeed_dsa.tools.compat.trained import judge

_KEY = "matrix"
_DECLARED = {feature.name: feature for feature in catalogue.shipped()}
START = "tests.support.model:start"


class Note:
    """What one case has to say; travels with its report, since another process may write the record.

    Args:
        properties: of the test.
        pool: of workers.
    """

    def __init__(self, properties: list[tuple[str, object]], pool: Any) -> None:
        self._properties = properties
        self._pool = pool
        self._layout = ""
        self._features: tuple[str, ...] = ()

    def begins(self, layout: str, *features: str, switches: Mapping[str, Any] | None = None) -> bool:
        """Say what the case is about. True if there is nothing to train.

        The release includes the change itself, or lacks the code that is changed; where the feature declares
        which releases or platforms it needs, and these are others, it is refused by name.

        Args:
            layout: in which it trains.
            *features: their names; of several none is refused.
            switches: what a user would switch on.
        """
        self._layout, self._features = layout, features
        self._add("case", features, "")
        if len(features) > 1:
            return False
        (feature,) = features
        unmet = _unmet(_DECLARED[feature])
        if not unmet:
            return not _to_be_trained(feature)
        (error,) = self._pool.run(
            "tests.support.model:error_of", 1, case=START, switches=dict(switches or {})
        )
        line = next((line.strip(" -") for line in error.splitlines() if unmet in line), "")
        assert line.startswith(feature), error or f"{feature} is not refused, but {unmet}"
        self._add("refused", [feature], line[line.index(unmet) :].partition(";")[0])
        return True

    def trained(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """The case's training was that of stock, and these features were at work on all ranks together."""
        names = {name for rank in ranks for name in rank["at work"]}
        missing = [name for name in self._features if name not in names and _to_be_trained(name)]
        assert not missing, f"{missing} changed nothing; at work were {sorted(names)}"
        self._add("trained", sorted(names), "")

    def _add(self, what: str, features: Sequence[str], reason: str) -> None:
        self._properties.append((_KEY, [what, self._layout, list(features), reason]))


def at_work() -> list[str]:
    """:func:`features_at_work` in this process."""
    running = session.current()
    assert running is not None
    return features_at_work(running.features, mindspeed_dsa.report())


def features_at_work(on: Sequence[Feature], sites: Sequence[Mapping[str, Any]]) -> list[str]:
    """Features that have changed something of Megatron, or have nothing to change.

    Args:
        on: those that are switched on. What a backport at work supplies of them counts, too.
        sites: a session's report of them.
    """
    applied = {name for site in sites if site["state"] == "applied" for name in site["features"]}
    supplied = {name for each in on if each.name in applied for name in each.supplies}
    without_patches = {each.name for each in on if not each.patches}
    return sorted(applied | ((supplied | without_patches) & {each.name for each in on}))


def _unmet(feature: Feature) -> str:
    """What it needs and has not here, in the words in which it is refused; empty if there is nothing."""
    settings, _ = session.resolve({}, ())
    if settings.platform not in feature.requires.platforms:
        return f"runs on {', '.join(feature.requires.platforms)}"
    needed = feature.requires.versions.get(versions.MEGATRON_DISTRIBUTION, "")
    if SpecifierSet(needed).contains(str(versions.of_megatron()), prereleases=True):
        return ""
    return f"needs {versions.MEGATRON_DISTRIBUTION} {needed}"


def _to_be_trained(feature: str) -> bool:
    """Whether it has something to change in the installed release, or a backport has it instead."""
    known, installed = records.load(), str(versions.of_megatron())
    release = installed if installed in known.releases else known.releases[-1]
    return judge(_DECLARED[feature], release, known, _DECLARED.values()).word in ("fits", "by backport")


class Record:
    """Collects what cases say, and writes it when they are through.

    A file of the same release and versions is kept, but for the features and layouts that ran again.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._found: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            return
        notes = [value for key, value in report.user_properties if key == _KEY]
        for what, layout, features, reason in notes:
            if report.passed and what != "case":
                for feature in features:
                    self._found[feature][what][layout] = reason
            elif report.failed and what == "case":
                for feature in features:
                    self._found[feature]["fails"][layout] = _why(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput") or not self._found:
            return
        ran_with = {
            "megatron-core": versions.of_megatron(),
            "python": platform.python_version(),
            "torch": metadata.version("torch"),
            "mindspeed_dsa": metadata.version("mindspeed_dsa"),
        }
        features = {name: self._with_earlier(name, found) for name, found in self._earlier(ran_with).items()}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        content = {**ran_with, "features": dict(sorted(features.items()))}
        self._file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def _earlier(self, ran_with: Mapping[str, str | None]) -> dict[str, Any]:
        """What the file says of every feature that it or this run knows."""
        found: dict[str, Any] = {name: {} for name in self._found}
        if self._file.exists():
            content = json.loads(self._file.read_text(encoding="utf-8"))
            if all(content.get(name) == version for name, version in ran_with.items()):
                found |= content["features"]
        return found

    def _with_earlier(self, feature: str, earlier: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
        now = self._found.get(feature, {})
        again = {layout for layouts in now.values() for layout in layouts}
        together = {
            what: {
                **{layout: why for layout, why in earlier.get(what, {}).items() if layout not in again},
                **now.get(what, {}),
            }
            for what in sorted(earlier.keys() | now.keys())
        }
        return {what: dict(sorted(layouts.items())) for what, layouts in together.items() if layouts}


def _why(report: pytest.TestReport) -> str:
    """The line of an error that says what happened; of a process's output, the last error in it."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else report.longreprtext).strip().splitlines()
    errors = [line for line in lines if re.search(r"(Error|Exception|\berror): \S", line)]
    return (errors[-1] if errors else lines[0] if lines else "no message").strip()[:200]
