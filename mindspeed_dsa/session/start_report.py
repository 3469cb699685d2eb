"""The startup report of a run: one line for the platform, one table, one JSON file."""

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
    """One line for each flag that is nearly one of ours."""
    for typed, meant in found.items():
        _log.warning("%s is not a flag of mindspeed_dsa and has no effect; did you mean %s?", typed, meant)


def warn_of_overruled(found: Mapping[str, str]) -> None:
    """One line for each flag on the command line that a variable outranks."""
    for flag, variable in found.items():
        _log.warning("environment variable %s outranks %s of the command line", variable, flag, once=True)


def announce_platform(settings: Settings) -> None:
    """Report once that Megatron runs on the CPU in place of an accelerator."""
    if settings.platform == "cpu":
        _log.info("no accelerator in use, Megatron runs on the CPU platform (gloo)", once=True)


def warn_of_untried_torch() -> None:
    """One line where torch is older or newer than what the tests were run on."""
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
    """On rank 0: print the table, and write the same as JSON into ``folder``, if there is one.

    Args:
        settings: of the session.
        features: that are on.
        sites: of their patches.
        folder: of the JSON file.
        environment: what the checks of the job's surroundings have found, which is printed already.
        beside: other libraries that have changed Megatron.
    """
    if not log.is_first_rank():
        return
    notes = [f"note: {each}" for each in beside]
    print("\n".join([table(settings, features, sites), *notes]), file=sys.stderr, flush=True)
    if folder:
        path = Path(folder)
        record = {**as_dict(settings, features, sites), "environment": environment}
        record["beside"] = [each.as_dict() for each in beside]
        text = json.dumps(record, indent=1)
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / REPORT_FILE).write_text(text + "\n", encoding="utf-8")
        except OSError as error:  # a missing record must not stop a run that is ready to train
            _log.warning("%s cannot be written to %s: %s", REPORT_FILE, folder, error)


def table(settings: Settings, features: Sequence[Feature], sites: Sequence[SiteReport]) -> str:
    """Features that are on, what enabled them, and the state of their sites."""
    megatron = versions.of_megatron(settings.megatron_root) or "not found"
    rows = [("feature", "set by", "sites")]
    for feature in features:
        states: dict[str, int] = {}
        for site in sites:
            if feature.name in site.features:
                states[site.state] = states.get(site.state, 0) + 1
        rows.append((feature.name, who_set(feature, settings), counted(states)))
    lines = aligned(rows)
    rule = "-" * max(map(len, lines))
    head = f"mindspeed_dsa on {settings.platform}, megatron-core {megatron}: {len(features)} features on"
    lines = [head, rule, lines[0], rule, *lines[1:], rule]
    support = {feature.name for feature in features if feature.platform_support}
    lines += [f"note: {site.target}: {text}" for site in sites for text in _remarks(site, support)]
    return "\n".join(lines)


def as_dict(settings: Settings, features: Sequence[Feature], sites: Sequence[SiteReport]) -> dict[str, Any]:
    """The same as plain data."""
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
    """The settings that switched a feature on or off, in words."""
    chosen = settings.chosen()
    on = feature.name in settings.features_on
    # A flag of Megatron's explains why a feature is on; only its own switch explains why it is off.
    setters = [chosen[f.dest].who for f in feature.flags if f.dest in chosen and (on or not f.megatron)]
    if setters:
        return ", ".join(setters)
    if feature.platform_support:
        return f"platform {settings.platform}"
    return "default"


def counted(states: dict[str, int]) -> str:
    """``3 applied, 1 pending``."""
    return ", ".join(f"{count} {state}" for state, count in states.items()) or "no patches"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of text, padded by what a terminal shows."""
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
    # sites that were never imported are reported by doctor only
    found = [] if site.state == "pending" else list(site.notes)
    if site.state in ("foreign", "failed"):
        found.append(site.reason)
    # torch keeps tables of its own functions, which a platform's redirections deliberately do not change;
    # doctor lists them.
    if site.stale and not support.issuperset(site.features):
        found.append(f"the original is still held by {', '.join(site.stale)}")
    return found
