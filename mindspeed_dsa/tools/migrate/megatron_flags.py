"""Which releases of Megatron have which flags: a record, and how it is made.

``python -m mindspeed_dsa.tools.migrate.megatron_flags RELEASE [FILE]`` adds the parser of the Megatron
that is on the path, a checkout of that release, to the record.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

from packaging.version import Version

from mindspeed_dsa import session

RECORD = Path(__file__).with_name("megatron_flags.json")


@cache
def record() -> dict[str, tuple[str, ...]]:
    """By flag, the recorded releases that have it, oldest first."""
    kept = json.loads(RECORD.read_text(encoding="utf-8"))
    releases = kept["releases"]
    return {
        flag: tuple(release for release, has in zip(releases, bits, strict=True) if has == "1")
        for flag, bits in kept["flags"].items()
    }


@cache
def releases() -> tuple[str, ...]:
    """Return the recorded releases, oldest first."""
    return tuple(json.loads(RECORD.read_text(encoding="utf-8"))["releases"])


def known(flag: str) -> bool:
    """Return whether any recorded release has the flag."""
    return flag in record()


def lacks(flag: str, release: Version | None) -> str:
    """Which releases have a flag, if the given one, or the newest, is known to lack it; else empty.

    Between two recorded releases the nearer older one counts.
    """
    having = record().get(flag)
    if having is None:
        return ""
    older = [each for each in releases() if release is None or Version(each) <= release]
    if not older or older[-1] in having:
        return ""
    first, last = having[0], having[-1]
    return f"{first} to {last}" if last != releases()[-1] else f"{first} and later"


def of_parser(parser: argparse.ArgumentParser) -> list[str]:
    """All long options of a parser."""
    return sorted(name for name in parser._option_string_actions if name.startswith("--"))


def installed(root: str = "megatron") -> list[str]:
    """Long options of the parser of the Megatron-LM that can be imported.

    Raises:
        ModuleNotFoundError: there is only its core.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    import_module(f"{root}.training.arguments").add_megatron_arguments(parser)
    return of_parser(parser)


def add(release: str, flags: list[str], file: Path = RECORD) -> None:
    """Write the record again with one more release, or with another parser of a known one."""
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"releases": [], "flags": {}}
    having = {
        each: {f for f, bits in kept["flags"].items() if bits[number] == "1"}
        for number, each in enumerate(kept["releases"])
    }
    having[release] = set(flags)
    order = sorted(having, key=Version)
    names = sorted(set().union(*having.values()))
    table = {name: "".join("01"[name in having[each]] for each in order) for name in names}
    file.write_text(json.dumps({"releases": order, "flags": table}, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    session.enable_from_argv(
        []
    )  # Megatron-LM's modules are imported on machines without an accelerator as well
    add(sys.argv[1], installed(), Path(sys.argv[2]) if sys.argv[2:] else RECORD)
