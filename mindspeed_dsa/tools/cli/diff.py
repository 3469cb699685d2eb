"""``diff``: look up every patch target in a wheel, an installed version, a release or a checkout."""

from __future__ import annotations

import argparse
import json
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet

from mindspeed_dsa.feature import Feature
from mindspeed_dsa.features import everything
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.drift import Checker, Finding
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.patches.source_tree import SourceTree
from mindspeed_dsa.session import records
from mindspeed_dsa.tools.cli.doctor_text import wrapped
from mindspeed_dsa.tools.compat import refresh, trained

_WORDS = {"parameter": "parameter missing", "out-of-range": "out of range"}


@dataclass(frozen=True)
class SiteResult:
    """Result of checking one patch target of one feature.

    Attributes:
        fatal: messages about problems that stop the feature.
        lost: messages about a missing optional target; the feature runs without this patch.
    """

    target: str
    kind: str
    required: bool
    state: str
    messages: list[str]
    fatal: list[str]
    lost: list[str]


@dataclass(frozen=True)
class FeatureResult:
    """Results for one feature; ``refused`` is the reason why it does not support this release, or empty."""

    name: str
    refused: str
    sites: list[SiteResult]


def run(argv: Sequence[str]) -> int:
    """Check all targets, print the findings, and return 1 if an available feature would fail."""
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_dsa diff",
        description="Looks up the features' patch targets in sources of Megatron, without importing them: "
        "does each target exist, does it take the parameters that the patch relies on, is it the release's "
        "code?",
        epilog="Exit status: 0 all well, 1 a required target is missing or takes other parameters, 2 the "
        "sources cannot be read.",
    )
    parser.add_argument(
        "source", metavar="PATH_OR_VERSION", help="a wheel, a checkout, 'installed', or a release to fetch"
    )
    parser.add_argument(
        "--megatron-root", "--root", default="megatron", help="package that replaces megatron in a fork"
    )
    parser.add_argument(
        "--release",
        type=versions.release,
        help="the Megatron-core release to compare with (default: the one it declares)",
    )
    parser.add_argument(
        "--trained",
        type=Path,
        metavar="FILE",
        help="what the tests of `make test-matrix` or `make next` wrote with these sources: print one line "
        "for each feature, whether it trained, fits or fails, and count failed tests as problems",
    )
    parser.add_argument("--all", action="store_true", help="list every target")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else")
    options = parser.parse_args(list(argv))
    root = options.megatron_root
    tree = _sources(options.source, root)
    release = options.release or _release(tree, root)
    checker = Checker(tree, release, records.load().fingerprints(), root)
    results = [_examine(feature, checker, root) for feature in everything()]
    problems = [
        f"{feature.name}: {text}"
        for feature in results
        if not feature.refused
        for site in feature.sites
        for text in site.fatal
    ]
    outcomes = {} if options.trained is None else _outcomes(results, options.trained, release)
    problems += [
        f"{name}: {outcome.word}"
        for name, outcome in outcomes.items()
        if outcome.word.startswith(trained.FAILS)
    ]
    if options.json:
        described = {"source": tree.label, "root": root, "release": release}
        features = [asdict(result) for result in results]
        for feature in features if outcomes else ():
            feature |= asdict(outcomes[feature["name"]])
        print(json.dumps({**described, "features": features, "problems": problems}, indent=1))
    elif outcomes:
        print(f"{root} {release} in {tree.label}\n")
        width = max(map(len, outcomes))
        for name, test in outcomes.items():
            print(f"{name:<{width}}  {test.word}" + (f" ({'; '.join(test.layouts)})" if test.layouts else ""))
    else:
        print("\n".join(_text(tree, root, release, results, options.all)))
    return 1 if problems else 0


def _examine(feature: Feature, checker: Checker, root: str) -> FeatureResult:
    sites = []
    for row in feature.patches:
        patch = row.under_root(root)
        if patch.module.partition(".")[0] != root:
            continue  # a patch of torch: not in these sources
        findings = checker.check(patch) or [Finding("ok", "")]
        fatal = [finding.message for finding in findings if finding.fatal and patch.required]
        messages = [finding.message for finding in findings if finding.message]
        lost = [] if patch.required else checker.without_target(patch)
        state = findings[0].state
        sites.append(SiteResult(patch.label, patch.kind, patch.required, state, messages, fatal, lost))
    return FeatureResult(feature.name, _refusal(feature, checker.version), sites)


def _outcomes(results: Sequence[FeatureResult], file: Path, release: str | None) -> dict[str, trained.Result]:
    """Return a dict from feature to its test result with these sources, or its static verdict.

    Raises:
        SettingsError: the file cannot be read, or is for another release.
    """
    try:
        tests = json.loads(file.read_text(encoding="utf-8"))
        tested = tests["megatron-core"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"mindspeed_dsa diff: {file} holds no results of tests: {error!r}") from error
    if tested != release:
        raise SettingsError(
            f"mindspeed_dsa diff: {file} is of megatron-core {tested}, the sources of {release}"
        )
    return {
        feature.name: trained.result(tests["features"].get(feature.name, {}), _verdict(feature))
        for feature in results
    }


def _verdict(result: FeatureResult) -> str:
    """Return the static verdict, in the words of the compatibility page."""
    fatal = [text for site in result.sites for text in (*site.fatal, *site.lost)]
    if result.refused:
        return f"{trained.REFUSED}: {result.refused}"
    if fatal:
        return f"{trained.FAILS}: {'; '.join(fatal)}"
    # The version range of every row excludes this release.
    if result.sites and all(site.state == "out-of-range" for site in result.sites):
        return "not needed"
    return "fits"


def _refusal(feature: Feature, release: str | None) -> str:
    needed = feature.requires.versions.get(versions.MEGATRON_DISTRIBUTION, "")
    if release is None or SpecifierSet(needed).contains(release, prereleases=True):
        return ""
    return f"it needs {versions.MEGATRON_DISTRIBUTION} {needed}"


def _text(
    tree: SourceTree, root: str, release: str | None, results: Sequence[FeatureResult], everything: bool
) -> list[str]:
    """Return the report's lines: totals, then problems; all targets only with ``--all``."""
    sites = [(feature, site) for feature in results for site in feature.sites]
    # A refused feature cannot be switched on here, so its findings are no problem.
    served = [(feature, site) for feature, site in sites if not feature.refused]
    words = Counter(_word(site) for _, site in sites)
    counted = ", ".join(f"{number} {word}" for word, number in words.most_common())
    stopping = [(feature, site) for feature, site in served if site.fatal]
    lines = [
        f"{root} {release or '(release unknown)'} in {tree.label}",
        f"{len(sites)} targets: {counted}; {len(stopping)} would stop a feature",
    ]
    if refused := [f"{result.name} ({result.refused})" for result in results if result.refused]:
        lines += ["", f"refused with these sources: {', '.join(refused)}"]
    if lost := [f"{feature.name}: {text}" for feature, site in served for text in site.lost]:
        lines += ["", "parts of features that are lost:", *(f"  {text}" for text in lost)]
    if stopping:
        lines += ["", "would stop a feature:"]
        lines += [f"  {feature.name}: {text}" for feature, site in stopping for text in site.fatal]
    if changed := [pair for pair in sites if pair[1].state == "changed"]:
        lines += ["", "changed in these sources, and patched:"]
        lines += [f"  {feature.name}: {text}" for feature, site in changed for text in site.messages]
    return [*map(wrapped, lines), *(_targets(results) if everything else ["", "--all lists every target"])]


def _targets(results: Sequence[FeatureResult]) -> list[str]:
    lines = []
    for feature in results:
        lines += ["", feature.name + (f": refused, {feature.refused}" if feature.refused else "")]
        for site in feature.sites:
            optional = "" if site.required else " (optional)"
            lines.append(f"  {_word(site):<18}{site.kind:<8}{site.target}{optional}")
            lines += [f"{'':<28}{message}" for message in site.messages]
        if not feature.sites:
            lines.append("  patches nothing of Megatron")
    return lines


def _word(site: SiteResult) -> str:
    return _WORDS.get(site.state, site.state)


def _sources(text: str, root: str) -> SourceTree:
    """Return the Megatron source tree that the command line argument ``PATH_OR_VERSION`` names.

    Raises:
        SettingsError: the text is neither a wheel, a folder, a release nor 'installed'.
        MindSpeedDSAError: pip cannot fetch the release.
    """
    path = Path(text).expanduser()
    if text == "installed":
        tree = SourceTree()
    elif path.is_dir():
        tree = SourceTree.folder(_top(path, root))
    elif path.is_file():
        try:
            tree = SourceTree.archive(path)
        except zipfile.BadZipFile as error:
            raise SettingsError(f"mindspeed_dsa diff: {path} is not a wheel: {error}") from error
    else:
        tree = SourceTree.archive(refresh.fetch(_version(text)))
    if not tree.holds(f"{root}.core"):
        raise SettingsError(
            f"mindspeed_dsa diff: there is no package {root}.core in {tree.label}{_elsewhere(path)}; name "
            "the folder that holds the package, and a fork's package with --megatron-root"
        )
    return tree


def _top(path: Path, root: str) -> Path:
    """Return the folder that contains the root package, for this folder, its parent or the package."""
    # /repo, /repo/src/.. as in newer checkouts, or /repo/megatron.
    for top in (path, path / "src", path.parent if path.name == root else path):
        if (top / root / "core").is_dir():
            return top
    return path


def _elsewhere(path: Path) -> str:
    found = sorted({file.parents[1].name for file in path.glob("**/core/package_info.py")})
    return f" (but there is {', '.join(found)})" if found else ""


def _version(text: str) -> str:
    try:
        return versions.release(text)
    except ValueError:
        raise SettingsError(
            f"mindspeed_dsa diff: {text!r} is neither a file, a folder, a release number nor 'installed'"
        ) from None


def _release(tree: SourceTree, root: str) -> str | None:
    """Return the Megatron-core release that the sources declare, ``None`` if they declare none."""
    info = tree.module(f"{root}.core.package_info")
    return versions.version_in_source(info.text) if info is not None and info.text else None
