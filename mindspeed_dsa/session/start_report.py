"""Start report of a run: one line about the platform, one table, one JSON file."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_dsa import log
from mindspeed_dsa.feature import Feature
from mindspeed_dsa.patches import SiteReport, versions
from mindspeed_dsa.session.beside import Presence
from mindspeed_dsa.settings import Settings

REPORT_FILE = "mindspeed_dsa.json"

_log = log.get()


def warn_of_near_misses(found: Mapping[str, str]) -> None:
    """Log one line for each probably misspelt flag of ours."""
    for typed, meant in found.items():
        _log.warning("%s is not a flag of mindspeed_dsa and has no effect; did you mean %s?", typed, meant)


def warn_of_overruled(found: Mapping[str, str]) -> None:
    """Log one line for each command line flag that an environment variable overrides."""
    for flag, variable in found.items():
        _log.warning("environment variable %s outranks %s of the command line", variable, flag, once=True)


def announce_platform(settings: Settings) -> None:
    """Log once that Megatron runs on the CPU instead of an accelerator."""
    if settings.platform == "cpu":
        _log.info("no accelerator in use, Megatron runs on the CPU platform (gloo)", once=True)


def warn_of_untried_torch() -> None:
    """Log one line if torch is outside the tested range."""
    if (version := versions.untried_torch()) is not None:
        _log.warning(
            "torch %s was not tried with this release (%s was); compare a few steps with the features off",
            version,
            versions.TORCH_TRIED,
            once=True,
        )


def publish(
    settings: Settings,
    features: Sequence[Feature],
    sites: Sequence[SiteReport],
    folder: str | None,
    environment: Sequence[Mapping[str, str]],
    beside: Sequence[Presence],
) -> None:
    """Print the start report on rank 0, and write it as JSON into ``folder`` if given.

    Args:
        settings: session's settings.
        features: features that are on.
        sites: states of the features' patches.
        folder: folder of the JSON file.
        environment: findings of the environment checks, which are already printed.
        beside: other libraries that have changed Megatron.
    """
    if not log.is_first_rank():
        return
    notes = [f"note: {presence}" for presence in beside]
    print("\n".join([table(settings, features, sites), *notes]), file=sys.stderr, flush=True)
    if folder:
        path = Path(folder)
        record = {**as_dict(settings, features, sites), "environment": environment}
        record["beside"] = [presence.as_dict() for presence in beside]
        text = json.dumps(record, indent=1)
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / REPORT_FILE).write_text(text + "\n", encoding="utf-8")
        except OSError as error:  # a missing record must not stop a run that can train
            _log.warning("%s cannot be written to %s: %s", REPORT_FILE, folder, error)


def table(settings: Settings, features: Sequence[Feature], sites: Sequence[SiteReport]) -> str:
    """Return a table of the active features, the settings that enabled them, and their patches' state."""
    megatron = versions.of_megatron(settings.megatron_root) or "not found"
    rows = [("feature", "set by", "sites")]
    for feature in features:
        states: dict[str, int] = {}
        for site in sites:
            if feature.name in site.features:
                states[site.state] = states.get(site.state, 0) + 1
        rows.append((feature.name, who_set(feature, settings), counted(states)))
    lines = aligned(rows)
    # As wide as the widest line.
    rule = "-" * max(map(len, lines))
    head = f"mindspeed_dsa on {settings.platform}, megatron-core {megatron}: {len(features)} features on"
    lines = [head, rule, lines[0], rule, *lines[1:], rule]
    support = {feature.name for feature in features if feature.platform_support}
    lines += [f"note: {site.target}: {text}" for site in sites for text in _remarks(site, support)]
    return "\n".join(lines)


def as_dict(settings: Settings, features: Sequence[Feature], sites: Sequence[SiteReport]) -> dict[str, Any]:
    """Return the content of :func:`table` as plain data."""
    return {
        "versions": versions.installed(settings.megatron_root),
        "platform": settings.platform,
        "features": [
            {"name": f.name, "on": True, "set_by": who_set(f, settings), "plugin": f.distribution or None}
            for f in features
        ],
        "sites": [site.as_dict() for site in sites],
    }


def who_set(feature: Feature, settings: Settings) -> str:
    """Return the settings that switched a feature on or off, in words."""
    explicit = settings.chosen()
    on = feature.name in settings.features_on
    # One of Megatron's flags explains why a feature is on; only its own switch explains why it is off.
    setters = [explicit[f.dest].who for f in feature.flags if f.dest in explicit and (on or not f.megatron)]
    if setters:
        return ", ".join(setters)
    if feature.platform_support:
        return f"platform {settings.platform}"
    return "default"


def counted(states: dict[str, int]) -> str:
    """Format counts as ``3 applied, 1 pending``."""
    return ", ".join(f"{count} {state}" for state, count in states.items()) or "no patches"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return one line of text per row, with cells padded to columns of equal width in a terminal."""
    widths = [max(_columns(row[column]) for row in rows) for column in range(len(rows[0]))]
    padded = (
        (cell + " " * (width - _columns(cell)) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return ["  ".join(cells).rstrip() for cells in padded]


def _columns(text: str) -> int:
    # Chinese characters are two columns wide
    return len(text) + sum(unicodedata.east_asian_width(each) in "WF" for each in text)


def _remarks(site: SiteReport, support: set[str]) -> list[str]:
    # doctor reports patches of modules that were never imported; a run does not
    remarks = [] if site.state == "pending" else list(site.notes)
    if site.state in ("foreign", "failed"):
        remarks.append(site.reason)
    # torch keeps tables of its own functions, which platform redirections leave unchanged on purpose. doctor
    # lists them.
    if site.stale and not support.issuperset(site.features):
        remarks.append(f"the original is still held by {', '.join(site.stale)}")
    return remarks
