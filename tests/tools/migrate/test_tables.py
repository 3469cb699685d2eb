"""The tables: every flag once, every present name a real one, and nothing of MindSpeed's left out."""

from __future__ import annotations

import ast
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from mindspeed_dsa import features
from mindspeed_dsa.tools.migrate import megatron_flags
from mindspeed_dsa.tools.migrate.core_flags import CORE
from mindspeed_dsa.tools.migrate.llm_flags import LLM
from mindspeed_dsa.tools.migrate.translate import own_flags, table

ROWS = [*CORE, *LLM]


@pytest.mark.parametrize("rows", [CORE, LLM], ids=["core", "llm"])
def test_each_flag_has_one_row_with_a_reason(rows):
    flags = [row.flag for row in rows]
    assert len(flags) == len(set(flags))
    for row in rows:
        assert row.verdict in ("same", "megatron") or (row.why.endswith(".") and len(row.why) > 10), row
        assert not row.results or row.verdict == "not served", row


def test_flags_that_are_the_same_are_ours():
    read = {flag.name for flag in features.all_flags()}
    assert {row.flag for row in ROWS if row.verdict == "same"} <= own_flags() & read


def test_present_names_are_flags_of_megatron_or_ours():
    gone = [
        row
        for row in ROWS
        if row.verdict == "megatron" and not (megatron_flags.known(row.now) or row.now in own_flags())
    ]
    assert not gone


@pytest.mark.skipif(find_spec("megatron.training") is None, reason="this Megatron is its core alone")
def test_the_record_is_what_the_installed_parser_has():
    from packaging.version import Version

    from mindspeed_dsa.patches import versions

    release = str(versions.of_megatron())
    parser = set(megatron_flags.installed())
    if release in megatron_flags.releases():
        assert parser == {flag for flag, having in megatron_flags.record().items() if release in having}
    for row in ROWS:
        if row.verdict == "megatron" and row.now not in own_flags():
            assert row.now in parser or megatron_flags.lacks(row.now, Version(release)), row.now


def test_a_release_between_recorded_ones_counts_as_the_older(tmp_path):
    from packaging.version import Version

    assert megatron_flags.lacks("--moe-shared-expert-gate", Version("0.15.3")) == "0.16.1 and later"
    assert not megatron_flags.lacks("--moe-shared-expert-gate", Version("0.17.0"))
    assert megatron_flags.lacks("--use-legacy-models", None) == "0.12.1 to 0.16.1"
    assert not megatron_flags.lacks("--no-such-flag", None)
    file = tmp_path / "record.json"
    for release, flags in (("0.9.0", ["--a"]), ("0.16.1", ["--a", "--b"]), ("0.9.0", ["--b"])):
        megatron_flags.add(release, flags, file)
    assert (
        file.read_text().split()
        == '{ "releases": [ "0.9.0", "0.16.1" ], "flags": { "--a": "01", "--b": "11" } }'.split()
    )


def added_flags(folder: Path) -> set[str]:
    """Flags that ``add_argument`` adds anywhere in a folder's sources."""
    return {
        argument.value
        for file in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
        for argument in node.args
        if isinstance(argument, ast.Constant) and str(argument.value).startswith("--")
    }


@pytest.mark.skipif("MINDSPEED" not in os.environ, reason="MINDSPEED names no checkout of MindSpeed")
@pytest.mark.parametrize("below", ["mindspeed/features_manager", "mindspeed/arguments.py"])
def test_every_flag_of_mindspeed_has_a_verdict(below):
    path = Path(os.environ["MINDSPEED"]) / below
    flags = added_flags(path) if path.is_dir() else added_flags_of_file(path)
    assert len(flags) > 100
    assert flags <= {row.flag for row in CORE}


def added_flags_of_file(path: Path) -> set[str]:
    return {flag for flag in added_flags(path.parent) if f"'{flag}'" in path.read_text(encoding="utf-8")}


@pytest.mark.skipif(
    "MINDSPEED_LLM" not in os.environ, reason="MINDSPEED_LLM names no checkout of MindSpeed-LLM"
)
def test_every_flag_of_mindspeed_llm_has_a_verdict():
    flags = added_flags(Path(os.environ["MINDSPEED_LLM"]) / "mindspeed_llm" / "features_manager")
    assert len(flags) > 200
    assert flags <= set(table())
