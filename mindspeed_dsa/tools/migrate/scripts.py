"""Translation of launch scripts; new scripts are written next to the old ones."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.tools.migrate import in_place, lists, megatron_lm, other_scripts, shell
from mindspeed_dsa.tools.migrate.job import Given, split
from mindspeed_dsa.tools.migrate.shell import ShellError
from mindspeed_dsa.tools.migrate.translate import Translation, quoted, translate, words

_MARK = ".mindspeed_dsa"
_NOTHING = Translation((), (), ())
_ABOVE = "All flags stand in the command; arrays and strings above it, from which they came, have no effect."


@dataclass(frozen=True)
class Migrated:
    """A migrated launch script.

    Attributes:
        path: path of the old script.
        script: Python script that the launch script starts; empty for files with only an argument list.
        translation: translation of the script's flags.
        notes: sentences about skipped lines, Megatron-LM's release, and the Python script.
        text: text of the new script.
        instead: advice on what to run instead, if the script does not start a training; else empty.
    """

    path: Path
    script: str
    translation: Translation
    notes: tuple[str, ...]
    text: str
    instead: str = ""

    @property
    def new_path(self) -> Path:
        """Path of the new script: ``train.mindspeed_dsa.sh`` for ``train.sh``."""
        return self.path.with_name(f"{self.path.stem}{_MARK}{self.path.suffix}")

    def record(self) -> dict[str, Any]:
        """Return the script's translation, notes and paths as plain data for JSON."""
        return {
            "script": str(self.path),
            "starts": self.script,
            **self.translation.record(),
            "instead": self.instead,
            "notes": list(self.notes),
        }


def migrate(path: Path, release: Version | None = None) -> Migrated:
    """Read and translate one launch script, of the type given by its suffix.

    Raises:
        SettingsError: the script cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            return _of_words(path, lists.of_python(text), release, _as_python)
        if path.suffix in (".yaml", ".yml"):
            if instead := other_scripts.of_yaml(lists.parsed(text)):
                return Migrated(path, "", _NOTHING, (), "", instead)
            return _of_words(path, lists.of_yaml(text), release, _as_yaml)
        if instead := other_scripts.of_shell(text):
            return Migrated(path, "", _NOTHING, (), "", instead)
        return _of_shell(path, text, release)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"mindspeed_dsa migrate: {path} cannot be read: {error}") from error
    except ShellError as error:
        raise SettingsError(f"mindspeed_dsa migrate: {path}: {error}") from error


def write(migrated: Migrated, overwrite: bool) -> Path:
    """Write the new script next to the old one.

    Raises:
        SettingsError: the file exists or cannot be written.
    """
    path = migrated.new_path
    try:
        with path.open("w" if overwrite else "x", encoding="utf-8") as file:
            file.write(migrated.text)
        path.chmod(migrated.path.stat().st_mode & 0o777)
    except FileExistsError as error:
        raise SettingsError(
            f"mindspeed_dsa migrate: {path} is there already; --overwrite replaces it, --dry-run writes "
            f"nothing"
        ) from error
    except OSError as error:
        raise SettingsError(f"mindspeed_dsa migrate: {path} cannot be written: {error}") from error
    return path


def _of_words(path: Path, found: Sequence[str], release: Version | None, render: Any) -> Migrated:
    first, flags = split(found)
    translation = translate(flags, release)
    text = render(path.name, first, translation)
    script = next((word for word in first if word.endswith(".py")), "")
    unknown = len(translation.of("unknown"))
    notes = (megatron_lm.sentence(megatron_lm.lacking(flags), unknown),)
    return Migrated(path, script, translation, notes, text)


def _of_shell(path: Path, text: str, release: Version | None) -> Migrated:
    start = shell.read(text)
    first, flags = split(start.words, start.written)
    translation = translate(flags, release)
    new = in_place.rewrite(text, start, flags, translation)
    notes = [*start.notes, *([] if new else [_ABOVE])]
    new = new or _behind(text, start, first, translation)
    notes += _left_out(flags, new)
    lacks = megatron_lm.lacking(flags)
    said = [
        megatron_lm.sentence(lacks, len(translation.of("unknown"))),
        *megatron_lm.program(path, start.script, megatron_lm.clone(lacks)),
    ]
    head = "".join(f"# {line}\n" for line in (*_head(path.name, translation), *map("Note: {}".format, notes)))
    # The comments go after the shebang, which must stay the first line.
    shebang, rest = re.match(r"(#![^\n]*\n)?(.*)", new, re.DOTALL).groups("")  # type: ignore[union-attr]
    new = f"{shebang}{head}{megatron_lm.renamed(rest, start.script)}"
    return Migrated(path, start.script, translation, (*notes, *said), new)


def _behind(text: str, start: shell.Start, first: Sequence[str], translation: Translation) -> str:
    """Return the script with all flags written after the command instead of into its variables."""
    lines = [" ".join(map(quoted, [*start.launcher, *first]))]
    lines += [" ".join(map(quoted, words([given], written=True))) for given in translation.flags]
    command = " \\\n    ".join([*lines, *start.rest])
    return f"{text[: start.start]}{command}{text[start.end :]}"


def _left_out(flags: Sequence[Given], new: str) -> list[str]:
    """Return notes on unset variables that the new script lacks, because they may hold flags."""
    return [
        f"{value} is not set in the script, and is left out with {given.flag}: flags in it must be added"
        for given in flags
        for value in given.values
        if value.startswith("$") and value not in new
    ]


def _head(name: str, translation: Translation) -> list[str]:
    counts = translation.counts()
    lines = [f"Made of {name} by `python -m mindspeed_dsa migrate`: {counts['flags']} flags."]
    lines += [
        f"NOT SERVED, and results change without it: {outcome.given.flag}: {outcome.why}"
        for outcome in translation.refused
    ]
    lines += [f"Unknown, left as it is: {outcome.given.flag}" for outcome in translation.of("unknown")]
    lines += [
        f"Not served, same results: {outcome.given.flag}"
        for outcome in translation.of("not served")
        if not outcome.results
    ]
    return lines


def _as_python(name: str, first: Sequence[str], translation: Translation) -> str:
    rows = [f"    {', '.join(map(repr, words([given])))},\n" for given in translation.flags]
    head = "".join(f"# {line}\n" for line in _head(name, translation))
    return f"{head}ARGUMENTS = [\n{''.join(f'    {word!r},' + chr(10) for word in first)}{''.join(rows)}]\n"


def _as_yaml(name: str, first: Sequence[str], translation: Translation) -> str:
    def value(given: Given) -> str:
        return json.dumps(
            True if not given.values else given.values[0] if len(given.values) == 1 else list(given.values)
        )

    head = "".join(f"# {line}\n" for line in _head(name, translation))
    return head + "".join(f"{given.flag.lstrip('-')}: {value(given)}\n" for given in translation.flags)
