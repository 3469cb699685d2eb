"""``doctor``: versions, device, every feature, every patch site; exit status 1 on a problem."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import itertools
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from mindspeed_dsa import features, session, settings
from mindspeed_dsa.patches import MindSpeedDSAError, PatchError, SiteReport, versions
from mindspeed_dsa.session import start_report
from mindspeed_dsa.settings import ACCEPT_MINDSPEED
from mindspeed_dsa.tools.migrate import megatron_flags
from mindspeed_dsa.tools.migrate.accept import accept

_IN_ORDER = ("applied", "pending")


def run(argv: Sequence[str]) -> int:
    """Examine this machine under the given flags, print, undo everything."""
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_dsa doctor",
        description="Examines this installation. Flags of features, and Megatron's own, may follow: "
        "doctor shows their effect. Flags of the job's own parser may follow --, and are not looked at.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else")
    parser.add_argument("--all", action="store_true", help="list the platform's redirections as well")
    options, flags = parser.parse_known_args(list(argv))
    # Megatron and torch print while they are imported; stdout is reserved for the result.
    with contextlib.redirect_stdout(sys.stderr):
        findings = examine(flags)
    print(json.dumps(findings, indent=1) if options.json else as_text(findings, options.all))
    return 1 if findings["problems"] else 0


def examine(argv: Sequence[str]) -> dict[str, Any]:
    """``{versions, platform, features, sites, problems}``; patches for real, then undoes."""
    problems = [plugin.message for plugin in features.broken_plugins()]
    argv = list(argv)
    try:
        argv += [ACCEPT_MINDSPEED.name] if accept(argv) else []
    except MindSpeedDSAError as error:
        problems.append(str(error))
    before = session.current()
    sites: list[SiteReport] = []
    try:
        session.enable_from_argv(argv)
    except PatchError as error:
        problems += error.problems
    except MindSpeedDSAError as error:
        problems.append(str(error))
    running = session.current()
    if running is not None and running is not before:
        try:
            problems += running.problems(_as_arguments(running.settings))
        except MindSpeedDSAError as error:
            problems.append(str(error))
        problems += _verify(running)
        problems += _unknown_flags(argv, running.settings.megatron_root)
        sites = running.report()
        problems += [f"{s.target}: {s.reason}" for s in sites if s.state == "foreign"]
    findings = {
        "versions": versions.installed(running.settings.megatron_root if running else "megatron"),
        "platform": _platform(running),
        "features": _features(running),
        "sites": [site.as_dict() for site in sites],
        "problems": list(dict.fromkeys(problems)),
    }
    session.disable()
    return findings


def _as_arguments(resolved: settings.Settings) -> argparse.Namespace:
    """A job's arguments as if these were all; Megatron's flags only if they are given."""
    chosen = resolved.chosen()
    known = [flag.dest for flag in features.all_flags() if not flag.megatron or flag.dest in chosen]
    return argparse.Namespace(**{dest: getattr(resolved, dest) for dest in known})


def _unknown_flags(argv: Sequence[str], root: str) -> list[str]:
    """Flags that neither this library nor Megatron has, each with what it resembles."""
    own = settings.all_names([*settings.GENERAL_FLAGS, *features.all_flags()])
    try:
        megatron, whose = set(megatron_flags.installed(root)), "Megatron's parser"
    except Exception:  # only its core is here, or it cannot be imported without its own requirements
        megatron, whose = set(megatron_flags.record()), "Megatron-LM"
    found = []
    for token in itertools.takewhile(lambda token: token != "--", argv):
        name = token.partition("=")[0]
        if not name.startswith("--") or name in own | megatron:
            continue
        close = difflib.get_close_matches(name, sorted(own | megatron), n=1, cutoff=0.75)
        hint = f"; did you mean {close[0]}?" if close else ""
        having = megatron_flags.record().get(name, ())
        hint = f"; Megatron-LM {having[0]} to {having[-1]} has it" if having else hint
        found.append(
            f"{name} is a flag neither of this library nor of {whose}{hint} (flags of the job's own parser "
            "belong after --)"
        )
    return found


def _verify(running: session.Session) -> list[str]:
    """Import the modules of pending sites to get their actual states; then search for stale references."""
    problems = []
    for site in running.report():
        if site.state != "pending":
            continue
        module = site.target.partition(":")[0]
        try:
            import_module(module)
        except Exception as error:  # any failure of a third-party import is a finding
            if site.required:
                problems.append(f"{', '.join(site.features)}: {module} cannot be imported: {error!r}")
    try:
        running.verify()
    except PatchError as error:
        problems += error.problems
    return problems


def _platform(running: session.Session | None) -> dict[str, Any]:
    if running is None:
        return {"name": "unknown"}
    from mindspeed_dsa import platforms

    return {"name": running.settings.platform, **platforms.describe(running.settings.platform)}


def _features(running: session.Session | None) -> list[dict[str, Any]]:
    on = {feature.name for feature in running.features} if running else set()
    return [
        {
            "name": feature.name,
            "on": feature.name in on if running else None,
            "switch": feature.flags[0].name if feature.flags else None,
            "set_by": start_report.who_set(feature, running.settings) if running else "unknown",
            "summary": feature.summary,
            "plugin": feature.distribution or None,
        }
        for feature in features.all_features()
    ]


def as_text(findings: dict[str, Any], every_site: bool = False) -> str:
    """The findings as text; sites of a platform's redirections only on request or with a problem."""
    lines = ["versions:"]
    lines += [f"  {name}: {version or 'not installed'}" for name, version in findings["versions"].items()]
    facts = findings["platform"]
    plain = {key: value for key, value in facts.items() if not isinstance(value, dict)}
    lines += ["", "platform: " + ", ".join(f"{key} {value}" for key, value in plain.items())]
    for name, table in facts.items():
        if isinstance(table, dict):
            lines += [f"  {name}:", *(f"    {key}: {value}" for key, value in table.items())]
    decided = [row for row in findings["features"] if row["on"] is not None]
    if decided:
        rows = [("feature", "state", "switch", "set by")]
        rows += [
            (_name(row), "on" if row["on"] else "off", row["switch"] or "(automatic)", row["set_by"])
            for row in decided
        ]
        lines += ["", *start_report.aligned(rows)]
    else:
        lines += ["", "features: not resolved because of the problem below"]
    support = {feature.name for feature in features.all_features() if feature.platform_support}
    shown = [
        site
        for site in findings["sites"]
        if every_site or site["state"] not in _IN_ORDER or not support.issuperset(site["features"])
    ]
    if len(shown) < len(findings["sites"]):
        count = len(findings["sites"]) - len(shown)
        lines += ["", f"{count} sites of the platform's redirections are in order (--all lists them)"]
    if shown:
        rows = [("state", "site", "stack, outermost first", "remarks")]
        rows += [
            (site["state"], site["target"], " > ".join(site["stack"]), "; ".join(_remarks(site)))
            for site in shown
        ]
        lines += ["", *start_report.aligned(rows)]
    lines += ["", *(f"PROBLEM: {text}" for text in findings["problems"])]
    if not findings["problems"]:
        lines.append("no problems found")
    return "\n".join(lines)


def _name(row: dict[str, Any]) -> str:
    return f"{row['name']} ({row['plugin']})" if row["plugin"] else str(row["name"])


def _remarks(site: dict[str, Any]) -> list[str]:
    remarks = [site["reason"]] if site["reason"] else []
    if site["rebound"]:
        remarks.append(f"{site['rebound']} names rebound")
    if site["stale"]:
        holders = list(dict.fromkeys(site["stale"]))
        more = f" and {len(holders) - 2} more" if len(holders) > 2 else ""
        remarks.append(f"original also held by {', '.join(holders[:2])}{more}")
    return remarks + list(site["notes"])
