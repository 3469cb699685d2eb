"""``doctor``: report versions, device, features and patch sites; exit status 1 on a problem."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from mindspeed_dsa import features, session
from mindspeed_dsa.megatron.dsa import fused_wanted, uses_dsa
from mindspeed_dsa.megatron.selections import Sharing
from mindspeed_dsa.patches import MindSpeedDSAError, PatchError, SiteReport, drift, versions
from mindspeed_dsa.session import beside, checks, environment, start_report
from mindspeed_dsa.session.environment import installation
from mindspeed_dsa.settings import ACCEPT_MINDSPEED
from mindspeed_dsa.tools.cli import (
    doctor_arguments,
    doctor_device,
    doctor_job,
    doctor_operators,
    doctor_text,
)
from mindspeed_dsa.tools.cli.doctor_job import Command
from mindspeed_dsa.tools.cli.doctor_text import as_text
from mindspeed_dsa.tools.migrate.accept import accept


def run(argv: Sequence[str]) -> int:
    """Apply the given flags in this process, print the findings, and undo all patches."""
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_dsa doctor",
        description="Examines this installation. Flags of features, and Megatron's own, may follow: "
        "doctor shows their effect. Flags of the job's own parser may follow --, and are not looked at, but "
        "for DSA's; with the job's script before them, as in -- pretrain_gpt.py FLAGS, all are read.",
        epilog="With --job, all that follows -- is the job's command line, with its launcher and script or "
        "without: --job -- torchrun --nproc-per-node 8 pretrain_gpt.py FLAGS. Variables, limits and free "
        "disk are held against it.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else")
    parser.add_argument("--job", action="store_true", help="examine the surroundings that the job will meet")
    parser.add_argument(
        "--device",
        action="store_true",
        help="train a small model on the device as well: two steps in fp32, bf16 and on fused operators, "
        "a checkpoint, and a step from it; about a minute",
    )
    parser.add_argument("--all", action="store_true", help="list all features and sites as well")
    options, flags = parser.parse_known_args(list(argv))
    command = None
    if options.job:
        cut = argv.index("--") if "--" in argv else len(argv)
        _, before = parser.parse_known_args(list(argv[:cut]))
        command = Command.of(argv[cut + 1 :], before)
    # Megatron and torch print while they are imported; stdout is reserved for the result.
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's about packages that are not installed
        findings = examine(flags, command)
        if options.device:
            findings["device"] = doctor_device.examine(findings["platform"]["name"])
    print(json.dumps(findings, indent=1) if options.json else as_text(findings, options.all))
    return 1 if doctor_text.fails(findings) else 0


def examine(argv: Sequence[str], command: Command | None = None) -> dict[str, Any]:
    """Apply all patches, collect the findings for the report, and undo the patches.

    Args:
        argv: flags, then optionally ``--`` and the job's own part of the command line.
        command: complete command line of a job, used instead of ``argv``; adds checks of its environment.
    """
    if command is not None:
        argv = ["--", command.script or "pretrain_gpt.py", *command.flags]
    problems = [plugin.message for plugin in features.broken_plugins()]
    line = command or _line(argv)
    script = line.script
    argv, of_the_job = read_and_beside(list(argv))
    # The example job has its own parser, so Megatron's defaults do not apply to its missing flags.
    whole = bool(script or command) and not Command((), script, ()).is_example
    layers, operators, notes = "", [], []
    try:
        argv += [ACCEPT_MINDSPEED.name] if accept(argv) else []
    except MindSpeedDSAError as error:
        problems.append(str(error))
    # enable_from_argv may fail before it starts a session; `before` then stays the current one.
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
        # The order of a job: parse, let features rewrite the arguments, derive, then check.
        try:
            parser = doctor_arguments.parser_of(running)
            problems += doctor_arguments.unknown_flags(
                argv, of_the_job, parser, running.settings.megatron_root
            )
            args, refused = doctor_arguments.read(parser, running, argv, whole)
            problems += refused
            running.rewrite(args)  # as a job does before it is checked
            if whole:
                world = line.variables().get("WORLD_SIZE", "") if command or line.launcher else ""
                problems += doctor_arguments.derive(args, int(world) if world.isdigit() else 0)
            layers = _selecting(args)
            problems += running.problems(args)
            operators = doctor_operators.examine(running, args)
        except MindSpeedDSAError as error:
            problems.append(str(error))
        problems += _verify(running)
        problems += _without_target(running)
        sites = running.report()
        notes += _without_model(running, whole)
        problems += [f"{s.target}: {s.reason}" for s in sites if s.state == "foreign"]
    if command is not None:
        surroundings = doctor_job.examine(command, argv, running)
    else:
        surroundings = environment.early(running.settings) if running is not None else []
    problems += _unloaded(running)
    root = running.settings.megatron_root if running else "megatron"
    others, refused = _beside(running, script)
    problems += refused
    findings = {
        "versions": versions.installed(root),
        "megatron": [str(each) for each in installation.copies(root)],
        "beside": others,
        "platform": _platform(running),
        "layers": layers,
        "features": _features(running, [site.as_dict() for site in sites]),
        "operators": operators,
        "changes": _changes(sites),
        "sites": [site.as_dict() for site in sites],
        "environment": environment.records(surroundings),
        "problems": list(dict.fromkeys(problems)),
        "notes": notes,
    }
    # Undo all patches: `doctor` can be called inside a program that goes on to use Megatron.
    session.disable()
    return findings


def read_and_beside(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line at ``--`` into flags for doctor, and flags for the job's own parser.

    If a script or launcher follows ``--``, the rest is the job's complete command line. Doctor then reads all
    of its flags, too.
    """
    if "--" not in argv:
        return argv, []
    cut = argv.index("--")
    before, after = argv[:cut], Command.of(argv[cut + 1 :])
    return [*before, *after.flags] if after.script else before, [*after.flags]


def _line(argv: Sequence[str]) -> Command:
    """Return the command line after ``--``, which may be empty."""
    return Command.of(argv[argv.index("--") + 1 :]) if "--" in argv else Command((), "", ())


def _selecting(args: argparse.Namespace) -> str:
    """Return a sentence about the layers that select keys; empty without DSA or a number of layers."""
    layers = getattr(args, "num_layers", None)
    sharing = Sharing.of(args)
    if getattr(args, "experimental_attention_variant", None) != "dsa" or not layers:
        return ""
    if any(sharing.problems(layers)):
        return ""
    mtp_layers = getattr(args, "mtp_num_layers", None) or 0
    said = f"{sharing.words(layers)} of the decoder select keys"
    if mtp_layers:
        own = sum(sharing.mtp_computes(layer) for layer in range(1, mtp_layers + 1))
        said += f", and {own} of {mtp_layers} of multi-token prediction"
    return f"{said}; the others attend to keys selected below" if sharing.is_on else said


def _verify(running: session.Session) -> list[str]:
    """Import the modules that are not patched yet, which patches them, then search for originals in use."""
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


def _without_target(running: session.Session) -> list[str]:
    """Return messages about optional patches whose target is missing in a release in their version range."""
    root = running.settings.megatron_root
    checker = checks.checker(root)
    return [
        f"{feature.name}: {message}; {patch.why}, which is not done with this Megatron: report it, or switch "
        "the feature off"
        for feature in running.features
        for patch in (row.under_root(root) for row in feature.patches_for(running.settings))
        if not patch.required
        for message in checker.without_target(patch)
    ]


def _beside(running: session.Session | None, script: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return rows about other libraries that patch Megatron, and problems with the script's imports."""
    present = running.beside() if running else []
    installed, imports = beside.installed(), beside.imported_by(script)
    rows = [
        {
            "library": patcher.name,
            "release": installed.get(patcher, "not installed"),
            "imports": [f"{script} {line}" for line in imports.get(patcher, ())],
            "places": [],
            "dropped": [],
            "do": patcher.do,
        }
        for patcher in beside.PATCHERS
        if patcher in installed or patcher in imports
    ]
    rows += [{"release": "", "imports": [], "do": "", **presence.as_dict()} for presence in present]
    refused = beside.refused_imports(imports) if running and running.features else ()
    return rows, [f"{script} {text}" for text in refused]


def _unloaded(running: session.Session | None) -> list[str]:
    """Return the reason why an installed torch_npu fails to load; empty if another platform was requested."""
    from mindspeed_dsa import platforms

    if running is None or running.settings.mindspeed_platform != "auto":
        return []
    try:
        platforms.get("npu").is_available()
    except MindSpeedDSAError as error:
        return [str(error)]
    return []


def _platform(running: session.Session | None) -> dict[str, Any]:
    if running is None:
        return {"name": "unknown"}
    from mindspeed_dsa import platforms

    return {"name": running.settings.platform, **platforms.describe(running.settings.platform)}


def _without_model(running: session.Session, whole: bool) -> list[str]:
    """Return a note if a partial command line has ``--use-fused-dsa``, but no flags of a DSA model."""
    if whole or not fused_wanted(running.settings) or uses_dsa(running.settings):
        return []
    said = "fused-dsa acts on DSA models alone, and nothing here says --experimental-attention-variant dsa"
    return [f"{said}: without it the job trains dense attention"]


def _changes(sites: Sequence[SiteReport]) -> list[dict[str, Any]]:
    """Return the patched functions that a fork has changed, and whether our patch replaces the change."""
    return [
        {"target": site.target, "features": site.features, "text": note, "lost": drift.LOST in note}
        for site in sites
        if site.state != "skipped"
        for note in site.notes
        if drift.is_change(note)
    ]


def _features(running: session.Session | None, sites: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    on = {feature.name for feature in running.features} if running else set()
    states = {
        feature.name: doctor_text.state_of(feature.name, feature.name in on, sites) if running else "unknown"
        for feature in features.all_features()
    }
    supplies = {feature.name: feature.supplies for feature in features.all_features() if feature.supplies}
    states = doctor_text.with_suppliers(states, supplies)
    return [
        {
            "name": feature.name,
            "on": feature.name in on if running else None,
            "state": states[feature.name],
            "switch": feature.flags[0].name if feature.flags else None,
            "set_by": start_report.who_set(feature, running.settings) if running else "unknown",
            "summary": feature.summary,
            "plugin": feature.distribution or None,
        }
        for feature in features.all_features()
    ]
