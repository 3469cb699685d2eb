"""Results of the matrix on one release: which feature trained in which layout, was refused, or failed.

Cases describe themselves with the fixture ``note``. If ``MATRIX_RECORD`` names a file, the results are
written there; they are never edited by hand.
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
    """Result of one case. It travels with the test report, as another process may write the record.

    Args:
        properties: test's properties.
        pool: worker pool.
    """

    def __init__(self, properties: list[tuple[str, object]], pool: Any) -> None:
        self._properties = properties
        self._pool = pool
        self._layout = ""
        self._features: tuple[str, ...] = ()

    def begins(self, layout: str, *features: str, switches: Mapping[str, Any] | None = None) -> bool:
        """Record the case's layout and features; return True if there is nothing to train.

        There is nothing to train if the release includes the change or lacks the code to change. A feature
        that requires other releases or platforms must be refused by name.

        Args:
            layout: name of the layout.
            *features: names of the features; of several, none is refused.
            switches: user's switches.
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
        """Record that training matched stock and that every feature was active on some rank."""
        names = {name for rank in ranks for name in rank["at work"]}
        missing = [name for name in self._features if name not in names and _to_be_trained(name)]
        assert not missing, f"{missing} changed nothing; at work were {sorted(names)}"
        self._add("trained", sorted(names), "")

    def _add(self, what: str, features: Sequence[str], reason: str) -> None:
        self._properties.append((_KEY, [what, self._layout, list(features), reason]))


def at_work() -> list[str]:
    """Return :func:`features_at_work` for this process."""
    running = session.current()
    assert running is not None
    return features_at_work(running.features, mindspeed_dsa.report())


def features_at_work(on: Sequence[Feature], sites: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the features that changed something in Megatron, or have nothing to change.

    Args:
        on: enabled features; features supplied by an active backport count, too.
        sites: session's report of its patch sites.
    """
    applied = {name for site in sites if site["state"] == "applied" for name in site["features"]}
    supplied = {name for each in on if each.name in applied for name in each.supplies}
    without_patches = {each.name for each in on if not each.patches}
    return sorted(applied | ((supplied | without_patches) & {each.name for each in on}))


def _unmet(feature: Feature) -> str:
    """Return the unmet requirement in the words of the refusal, or an empty string."""
    settings, _ = session.resolve({}, ())
    if settings.platform not in feature.requires.platforms:
        return f"runs on {', '.join(feature.requires.platforms)}"
    needed = feature.requires.versions.get(versions.MEGATRON_DISTRIBUTION, "")
    if SpecifierSet(needed).contains(str(versions.of_megatron()), prereleases=True):
        return ""
    return f"needs {versions.MEGATRON_DISTRIBUTION} {needed}"


def _to_be_trained(feature: str) -> bool:
    """Return whether the feature, or a backport of it, changes something in the installed release."""
    table, installed = records.load(), str(versions.of_megatron())
    release = installed if installed in table.releases else table.releases[-1]
    return judge(_DECLARED[feature], release, table, _DECLARED.values()).word in ("fits", "by backport")


class Record:
    """Pytest plugin that collects the cases' results and writes the record at the end.

    An existing file of the same release and versions is kept, except for features and layouts that ran again.
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
        """Return the file's results for all features in the file or in this run."""
        results: dict[str, Any] = {name: {} for name in self._found}
        if self._file.exists():
            content = json.loads(self._file.read_text(encoding="utf-8"))
            if all(content.get(name) == version for name, version in ran_with.items()):
                results |= content["features"]
        return results

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
    """Return the line of an error that explains it; for a process's output, its last error."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else report.longreprtext).strip().splitlines()
    errors = [line for line in lines if re.search(r"(Error|Exception|\berror): \S", line)]
    return (errors[-1] if errors else lines[0] if lines else "no message").strip()[:200]
