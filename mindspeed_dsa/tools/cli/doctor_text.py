"""Text report of ``doctor``: verdict, active features and operators; everything else with ``--all``."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mindspeed_dsa.patches.errors import shortened
from mindspeed_dsa.session import start_report
from mindspeed_dsa.tools.cli import doctor_device

WIDTH = 110
"""Columns for wrapped prose. The tables of ``--all`` may be wider."""
# States without their own line in the report.
_IN_ORDER = ("applied", "pending", "skipped")
_GIB = 2**30
NOT_NEEDED = "not needed here"
"""State of an active feature if all its sites are skipped."""


def as_text(findings: Mapping[str, Any], everything: bool = False) -> str:
    """Return doctor's text report.

    Args:
        findings: result of ``doctor.examine``.
        everything: whether to list all features and sites, too.
    """
    parts = [
        list(_verdict(findings)),
        list(_versions(findings)),
        [f"layers: {findings['layers']}"] if findings["layers"] else [],
        list(_features(findings)),
        list(_operators(findings)),
        list(_changes(findings)),
        list(_sites(findings, everything)),
    ]
    if findings["beside"]:
        others = map(_other, findings["beside"])
        parts.append(["beside, other libraries that change Megatron:", *others])
    if findings["environment"]:
        parts.append(["environment:", *map(_finding, findings["environment"])])
    if "device" in findings:
        title = "device, a model of two layers trained on it:"
        parts.append([title, *doctor_device.lines(findings["device"])])
    if everything:
        parts += [list(_every_feature(findings)), list(_every_site(findings))]
    return "\n\n".join("\n".join(wrapped(line) for line in part) for part in parts if part)


def fails(findings: Mapping[str, Any]) -> bool:
    """Return whether any finding stops a job, so that the exit status is 1."""
    return bool(findings["problems"] or _errors(findings) or _failed(findings))


def _errors(findings: Mapping[str, Any]) -> int:
    return sum(each["level"] == "error" for each in findings["environment"])


def _failed(findings: Mapping[str, Any]) -> int:
    return sum("error" in each for each in findings.get("device", ()))


def _verdict(findings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems that stop a job, or a line that there are none."""
    yield from (f"PROBLEM: {text}" for text in findings["problems"])
    if errors := _errors(findings):
        yield f"PROBLEM: {_number(errors, 'error')} of the environment, below"
    if failed := _failed(findings):
        yield f"PROBLEM: {_number(failed, 'stage')} on the device failed, below"
    if not fails(findings):
        warnings = sum(each["level"] == "warning" for each in findings["environment"])
        yield "no problems found" + (f"; {_number(warnings, 'warning')} below" if warnings else "")
    if lost := sum(bool(each["lost"]) for each in findings.get("changes", ())):
        yield f"LOST: {_number(lost, 'change')} of this fork, below"
    yield from (f"note: {text}" for text in findings.get("notes", ()))


def _number(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' if count > 1 else ''}"


def _versions(findings: Mapping[str, Any]) -> Iterator[str]:
    versions = findings["versions"]
    here = [f"{name} {version}" for name, version in versions.items() if version]
    yield ", ".join(here)
    if absent := [name for name, version in versions.items() if not version]:
        yield f"not installed: {', '.join(absent)}"
    if len(findings["megatron"]) > 1:
        used, *hidden = findings["megatron"]
        yield f"megatron-core {used} is used, and hides {' and '.join(hidden)}"
    facts = findings["platform"]
    plain = [
        f"{key.removesuffix('_bytes')} {value / _GIB:.1f} GiB" if key.endswith("_bytes") else f"{key} {value}"
        for key, value in facts.items()
        if not isinstance(value, dict) and key != "name"
    ]
    name = f"platform {facts.get('name', '')}".rstrip()
    yield f"{name}{': ' if plain else ''}{', '.join(plain)}"
    for name, table in facts.items():
        if isinstance(table, dict):
            yield f"  {name}:"
            yield from (f"    {key}: {value}" for key, value in table.items())


def _features(findings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the active features, grouped by the flag, platform or default that switched them on."""
    if any(row["on"] is None for row in findings["features"]):
        yield "features: not resolved because of the problem above"
        return
    groups: dict[str, list[str]] = {}
    for row in findings["features"]:
        if row["state"] == "on":
            groups.setdefault(_by(row), []).append(_name(row))
    yield "on, by what switches them on:" if groups else "no feature is on"
    # False sorts before True: the user's own flags come first, defaults last.
    for by in sorted(groups, key=lambda each: each.startswith(("platform", "default"))):
        yield f"  {by}: {', '.join(groups[by])}"
    idle: dict[str, list[str]] = {}
    for row in findings["features"]:
        if row["state"] not in ("on", "off"):
            idle.setdefault(row["state"], []).append(_name(row))
    for state, names in sorted(idle.items(), reverse=True):
        skipped = ", each of their sites is skipped" if state == NOT_NEEDED else ""
        yield f"  {state}{skipped}: {', '.join(names)}"


def _by(row: Mapping[str, Any]) -> str:
    return re.sub(r"argv \((.*?)\)", r"\1", row["set_by"])


def _operators(findings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the backend of each operator, and why a faster one is skipped."""
    rows = findings.get("operators", ())
    if rows:
        yield f"operators, {rows[0]['dtype']} on {rows[0]['device']}:"
    for row in rows:
        skipped = "".join(f"; not {each['backend']}: {each['why']}" for each in row["skipped"])
        yield f"  {row['operator']}: {row['backend']}{skipped}"


def _changes(findings: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each patched function that the Megatron fork has changed."""
    rows = findings.get("changes", ())
    if rows:
        yield "changed in this Megatron, and patched:"
    for row in rows:
        yield f"  {'LOST' if row['lost'] else 'kept'}: {', '.join(row['features'])}: {row['text']}"


def _sites(findings: Mapping[str, Any], everything: bool) -> Iterator[str]:
    states = Counter(site["state"] for site in findings["sites"])
    if states:
        hint = "" if everything else "; --all lists them, and all features"
        yield f"sites: {', '.join(f'{count} {state}' for state, count in states.items())}{hint}"
    for site in findings["sites"]:
        if site["state"] not in _IN_ORDER:
            yield f"  {site['state']}: {site['target']}: {site['reason']}"


def _every_feature(findings: Mapping[str, Any]) -> Iterator[str]:
    rows = [("feature", "state", "switch", "set by")]
    rows += [
        (_name(row), row["state"], row["switch"] or "(automatic)", row["set_by"])
        for row in findings["features"]
        if row["on"] is not None
    ]
    return iter(start_report.aligned(rows))


def _every_site(findings: Mapping[str, Any]) -> Iterator[str]:
    rows = [("state", "site", "stack, outermost first", "remarks")]
    rows += [
        (site["state"], site["target"], " > ".join(site["stack"]), "; ".join(_remarks(site)))
        for site in findings["sites"]
    ]
    return iter(start_report.aligned(rows))


def _other(each: Mapping[str, Any]) -> str:
    said = [f"  {each['library']}{', ' if each['release'] else ''}{each['release']}"]
    said += [f"imported by {'; '.join(each['imports'][:3])}"] if each["imports"] else []
    said += [f"has changed {', '.join(each['places'])}"] if each["places"] else []
    said += [f"is no longer called in {', '.join(each['dropped'])}"] if each["dropped"] else []
    return "; ".join([*said, each["do"]] if each["imports"] else said)


def _finding(each: Mapping[str, str]) -> str:
    level = each["level"] if each["level"] == "note" else each["level"].upper()
    return f"  {level}: {each['who']}: {each['what']}; {each['do']} [{each['check']}]"


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['name']} ({row['plugin']})" if row["plugin"] else str(row["name"])


def _remarks(site: Mapping[str, Any]) -> list[str]:
    remarks = [site["reason"]] if site["reason"] else []
    if site["rebound"]:
        remarks.append(f"{site['rebound']} names rebound")
    if site["stale"]:
        holders = list(dict.fromkeys(site["stale"]))
        remarks.append(f"original also held by {shortened(holders, 2)}")
    return remarks + list(site["notes"])


def wrapped(line: str) -> str:
    """Wrap a line of prose to the screen's width; a table's row stays on one line."""
    if "\n" in line:
        return "\n".join(map(wrapped, line.split("\n")))
    if "   " in line.strip():  # three spaces only occur between columns of a table
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    pieces = textwrap.wrap(
        line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(pieces) or line


def state_of(name: str, is_on: bool, sites: Sequence[Mapping[str, Any]]) -> str:
    """Return ``on``, ``off``, or ``not needed here`` if all sites of a feature are skipped."""
    if not is_on:
        return "off"
    states = {site["state"] for site in sites if name in site["features"]}
    return NOT_NEEDED if states == {"skipped"} else "on"


def with_suppliers(states: Mapping[str, str], supplies: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Replace ``not needed here`` by ``in NAME`` for features that an active backport NAME includes.

    Args:
        states: dict from feature name to state, for all features.
        supplies: dict from backport name to the features that it contains.
    """
    result = dict(states)
    for backport, names in supplies.items():
        if states[backport] == "on":
            result |= {name: f"in {backport}" for name in names if states.get(name) == NOT_NEEDED}
    return result
