"""``migrate``: translate launch scripts of MindSpeed and MindSpeed-LLM, and report on every flag."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.version import InvalidVersion, Version

from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.session import start_report
from mindspeed_dsa.settings import did_you_mean
from mindspeed_dsa.tools.cli.doctor_text import wrapped
from mindspeed_dsa.tools.migrate import scripts
from mindspeed_dsa.tools.migrate.translate import KINDS, Translation, table

_DESCRIPTION = """\
Reads launch scripts that were written for MindSpeed or MindSpeed-LLM (shell; YAML with flags as keys; Python
with a list of arguments), says what serves each flag now, and writes train.mindspeed_dsa.sh beside train.sh.

Scripts that convert weights, prepare data, run a model or train by FSDP2 are not translated: a sentence says
what takes their place.

Exit status: 0 everything is served; 1 a flag that changes results is not, one is unknown, or a script is no
training by Megatron; 2 a script cannot be read, or contradicts itself."""
_WIDTH = 60
_ENGLISH: dict[str, str] = {
    **{str(kind): text for kind, text in KINDS.items()},
    "refused": "NOT SERVED",
    "head": "flag|verdict|now",
    "as it is": "(as it is)",
    "flags": "{} flags: ",
    "count": "{} {}",
    "comma": ", ",
    "change results": " ({} of them change results)",
    "problem": "PROBLEM: ",
    "note": "note: ",
    "written": "written: ",
    "instead": ". Nothing is translated.",
}
_CHINESE: dict[str, str] = {
    "same": "同名可用",
    "megatron": "换成 Megatron 的参数",
    "unchanged": "不变",
    "not needed": "不需要",
    "not served": "不支持",
    "unknown": "未知",
    "refused": "不支持（结果会变）",
    "head": "参数|结论|现在",
    "as it is": "（照旧）",
    "flags": "{} 个参数：",
    "count": "{1} {0} 个",
    "comma": "，",
    "change results": "（其中 {} 个会改变结果）",
    "problem": "问题：",
    "note": "提示：",
    "written": "已写出：",
    "instead": "。不转换。",
}
_WORDS = {"en": _ENGLISH, "zh": _CHINESE}
"""Dict from language to the report's words; reasons and notes are always in English."""


def run(argv: Sequence[str]) -> int:
    """Translate the scripts, print the report, and write the new scripts unless ``--dry-run``."""
    options, unknown = _parser().parse_known_args(list(argv))
    # argparse's own message would not suggest the nearest option.
    option_names = [f"--{name.replace('_', '-')}" for name in vars(options) if name != "scripts"]
    for name in unknown:
        raise SettingsError(f"mindspeed_dsa migrate: it takes no {name}{did_you_mean(name, option_names)}")
    if options.flags:
        print(_all_flags(_WORDS[options.lang]))
        return 0
    if not options.scripts:
        raise SettingsError("mindspeed_dsa migrate: name a script, or ask for --flags")
    release = _release(options.megatron)
    migrated, unread = [], []
    for script in options.scripts:
        try:
            migrated.append(scripts.migrate(Path(script), release))
        except SettingsError as error:
            unread.append(str(error))
    records = []
    for launch_script in migrated:
        # A contradictory script must not leave a runnable translation behind.
        written = not (options.dry_run or launch_script.translation.problems or launch_script.instead)
        new = "" if not written else str(scripts.write(launch_script, options.overwrite))
        records.append({**launch_script.record(), "new": new})
        if not options.json:
            print(_text(launch_script, new, options.all, _WORDS[options.lang]))
    if options.json:
        print(json.dumps({"megatron_core": str(release or ""), "scripts": records}, indent=1))
    elif len(migrated) > 1:
        print(_summary(migrated))
    if unread:  # the other scripts are reported all the same
        raise SettingsError("\n".join(unread))
    if any(launch_script.translation.problems for launch_script in migrated):
        return 2
    translations = [launch_script.translation for launch_script in migrated]
    others = any(launch_script.instead for launch_script in migrated)
    return int(others or any(each.refused or each.of("unknown") for each in translations))


def _release(text: str | None) -> Version | None:
    text = text or versions.of_megatron("megatron")
    try:
        return Version(text) if text else None
    except InvalidVersion as error:
        raise SettingsError(
            f"mindspeed_dsa migrate: --megatron {text}: give a release, such as 0.16.1"
        ) from error


def _text(migrated: scripts.Migrated, new: str, everything: bool, words: Mapping[str, str]) -> str:
    translation = migrated.translation
    if migrated.instead:
        return f"{migrated.path}: {migrated.instead}{words['instead']}\n"
    rows, reasons = [words["head"].split("|")], [""]
    for outcome in translation.outcomes:
        # Megatron's own flags with unchanged values fill pages; --all lists them.
        plain = outcome.kind == "unchanged" and outcome.now == str(outcome.given) and not outcome.why
        if plain and not everything:
            continue
        now = words["as it is"] if outcome.now == str(outcome.given) else outcome.now
        verdict = words["refused" if outcome.results else outcome.kind]
        rows.append([_short(str(outcome.given)), verdict, _short(now)])
        reasons.append(outcome.why)
    lines = [f"{migrated.path}: {_counted(translation, words)}", ""]
    lines += _with_reasons(rows, reasons)
    lines += [
        "",
        *(wrapped(f"{words['problem']}{text}") for text in translation.problems),
        *(wrapped(f"{words['note']}{text}") for text in migrated.notes),
    ]
    lines += [f"{words['written']}{new}"] if new else []
    return "\n".join([*lines, ""])


def _short(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."


def _counted(found: Translation, words: Mapping[str, str]) -> str:
    counts = found.counts()
    parts = [words["count"].format(counts[kind], words[kind]) for kind in KINDS if counts[kind]]
    refused = counts["change results"]
    more = words["change results"].format(refused) if refused else ""
    return f"{words['flags'].format(counts['flags'])}{words['comma'].join(parts)}{more}"


def _summary(migrated: Sequence[scripts.Migrated]) -> str:
    """Return a table with one row per script: number of flags per verdict, and the refused flags."""
    rows = [("script", "flags", *KINDS.values(), "change results")]
    for script in migrated:
        if script.instead:
            rows.append((script.path.name, *["-"] * (1 + len(KINDS)), "no training by Megatron: see above"))
            continue
        counts = script.translation.counts()
        refused = ", ".join(outcome.given.flag for outcome in script.translation.refused)
        numbers = (str(counts[kind]) for kind in KINDS)
        rows.append((script.path.name, str(counts["flags"]), *numbers, refused or "none"))
    return "\n".join(start_report.aligned(rows))


def _all_flags(words: Mapping[str, str]) -> str:
    rows, reasons = [words["head"].split("|")], [""]
    for row in table().values():
        verdict = words["refused" if row.results else row.verdict]
        rows.append([row.flag, verdict, row.now if row.now != row.flag else ""])
        reasons.append(row.why)
    return "\n".join(_with_reasons(rows, reasons))


def _with_reasons(rows: Sequence[Sequence[str]], reasons: Sequence[str]) -> list[str]:
    lines = []
    for row, why in zip(start_report.aligned(rows), reasons, strict=True):
        lines += [row, *([wrapped(f"    {why}")] if why else [])]
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_dsa migrate",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("scripts", nargs="*", metavar="SCRIPT", help="launch scripts: *.sh, *.yaml, *.py")
    add("--megatron", metavar="RELEASE", help="of Megatron-core that will train; default: the installed one")
    add("--lang", choices=sorted(_WORDS), default="en", help="of verdicts; reasons are in English")
    add("--all", action="store_true", help="print flags of Megatron's own as well")
    add("--dry-run", action="store_true", help="write no script")
    add("--overwrite", action="store_true", help="replace scripts that an earlier call has written")
    add("--json", action="store_true", help="everything, for other programs")
    add("--flags", action="store_true", help="print the verdict of every flag of MindSpeed and MindSpeed-LLM")
    return parser
