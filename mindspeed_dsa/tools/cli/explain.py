"""``features`` and ``explain``: list all features with their switches, and describe one of them."""

from __future__ import annotations

import argparse
import difflib
import posixpath
import sys
from collections.abc import Sequence

from mindspeed_dsa import features, settings
from mindspeed_dsa.feature import Feature, Flag
from mindspeed_dsa.features import everything
from mindspeed_dsa.session import start_report
from mindspeed_dsa.tools.cli import doctor_text, overview

_MANY = 12


def list_features(argv: Sequence[str]) -> int:
    """Print all features with their switches."""
    argparse.ArgumentParser(
        prog="python -m mindspeed_dsa features", description="Lists all features with their switches."
    ).parse_args(list(argv))
    rows = [("feature", "switch", "megatron-core")]
    rows += [(f.label, features.switch_of(f), _range(f)) for f in features.all_features()]
    head, *lines = start_report.aligned(rows)
    print(f"{head}\n    what it does")
    for line, feature in zip(lines, features.all_features(), strict=True):
        print(f"{line}\n{doctor_text.wrapped(f'    {feature.summary}')}")
    print("\n`python -m mindspeed_dsa explain NAME` says more about one of them.")
    for plugin in features.broken_plugins():
        print(f"\nPROBLEM: {plugin.message}")
    return 0


def _range(feature: Feature) -> str:
    if "megatron-core" in feature.requires.versions:
        return feature.requires.versions["megatron-core"]
    ranges = list(dict.fromkeys(patch.versions for patch in feature.patches))
    return (ranges[0] if len(ranges) == 1 else "by site") if ranges and all(ranges) else "any"


def run(argv: Sequence[str]) -> int:
    """Print a description of a flag or feature, or search for a word; return 2 if there is no match."""
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_dsa explain",
        description="Explains one flag or feature; another word is searched in names and summaries of "
        "features, flags and commands, and in titles of pages.",
    )
    # A flag looks like an option to argparse; `explain --use-x` must work as it is typed.
    if len(argv) != 1 or argv[0] in ("-h", "--help"):
        parser.add_argument("name", help="a feature's name, a flag in any spelling, or a word")
        parser.parse_args(list(argv))
    wanted = argv[0]
    readers: dict[str, list[Feature]] = {}
    flags = {name: flag for flag in settings.GENERAL_FLAGS for name in _spellings(flag)}
    for feature in everything():
        for flag in feature.flags:
            for name in _spellings(flag):
                flags.setdefault(name, flag)
                readers.setdefault(name, []).append(feature)
    named = {feature.name: feature for feature in everything()}
    if wanted in named:
        lines = explain(named[wanted]).splitlines()
    elif wanted in flags:
        lines = [*_flag_lines(flags[wanted]), *_readers(flags[wanted], readers.get(wanted, ()))]
    elif removed := settings.way_out([wanted]):
        print("\n".join(removed), file=sys.stderr)
        return 2
    elif found := _search(wanted.lower()):
        lines = [*found, "", "`python -m mindspeed_dsa explain NAME` says more about one of them."]
    else:
        close = difflib.get_close_matches(wanted, [*named, *flags], n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        hint += "".join(f"\n{plugin.message}" for plugin in features.broken_plugins())
        print(f"no feature or flag is called {wanted!r}{hint}", file=sys.stderr)
        return 2
    print("\n".join(map(doctor_text.wrapped, lines)))
    return 0


def _readers(flag: Flag, known: Sequence[Feature]) -> list[str]:
    """Return lines that describe the features that read a flag."""
    if not known:
        return []
    names = ", ".join(feature.label for feature in known)
    # A feature's first flag is its switch; its other flags are only options.
    switched = [feature for feature in known if feature.flags[0] is flag]
    return [
        f"read by {len(known)} feature{'s' if len(known) > 1 else ''}: {names}",
        *(f"{feature.label}: {feature.summary}" for feature in switched[:1]),
        f"`python -m mindspeed_dsa explain {(switched or known)[0].name}` says what that patches",
    ]


def _search(word: str) -> list[str]:
    """Return lines about features, flags, commands and pages with a word; many flags without help."""
    rows = [
        f"{feature.label}: {feature.summary}"
        for feature in everything()
        if word in feature.name or word in feature.summary.lower()
    ]
    flags_found = [flag for flag in (*settings.GENERAL_FLAGS, *features.all_flags()) if word in flag.name]
    if len(flags_found) > _MANY:
        flags = [f"flags: {', '.join(flag.name for flag in flags_found)}"]
    else:
        flags = [f"{flag.name}: {flag.help}" for flag in flags_found]
    parts = (rows, flags, overview.commands_with(word), overview.pages_with(word))
    # An empty line before each part; [1:] drops the one before the first.
    return [line for part in parts if part for line in ("", *part)][1:]


def explain(feature: Feature) -> str:
    """Return a feature's complete declaration as text."""
    lines = [feature.label, f"  {feature.summary}"]
    lines += [f"  on for {feature.when}"] if feature.when else []
    for flag in feature.flags:
        lines += ["", *(f"  {line}" for line in _flag_lines(flag))]
    requires = feature.requires
    needs = [f"{name} {wanted}" for name, wanted in requires.versions.items()]
    needs += [f"feature {name}" for name in requires.features]
    needs += [f"package {name} ({command})" for name, command in requires.packages.items()]
    lines += ["", f"  platforms: {', '.join(requires.platforms)}"]
    lines += [f"  needs: {', '.join(needs)}"] if needs else []
    lines += [f"  cannot be combined with {c.feature}: {c.why}" for c in feature.conflicts]
    lines += ["", "  patches:"] if feature.patches else ["", "  patches nothing"]
    for patch in feature.patches:
        scope = f" (megatron-core {patch.versions})" if patch.versions else ""
        lines += [f"    {patch.kind} {patch.target}{scope}", f"      {patch.why}"]
    if feature.doc and feature.distribution:
        lines += ["", f"  page: {feature.doc}"]
    elif feature.doc:
        page = posixpath.normpath(f"docs/features/{feature.doc.removesuffix('.md')}.md")
        lines += ["", f"  page: {page}"]
    return "\n".join(lines)


def _flag_lines(flag: Flag) -> list[str]:
    lines = [" / ".join((flag.name, *flag.aliases)), f"  {flag.help}"]
    if flag.choices:
        lines.append(f"  choices: {', '.join(map(str, flag.choices))}")
    default = "automatic" if flag.kind == "auto" else "Megatron's" if flag.megatron else repr(flag.unset)
    lines.append(f"  default {default}; environment {flag.env}; API keyword {flag.dest}")
    return lines


def _spellings(flag: Flag) -> tuple[str, ...]:
    return (flag.name, flag.name.lstrip("-"), flag.dest, flag.env, *flag.aliases)
