"""The tables: every flag once, every present name a real one, and every flag of MindSpeed included."""

from __future__ import annotations

import argparse
import ast
import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version

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
        if row.verdict == "megatron" and not (row.now in megatron_flags.record() or row.now in own_flags())
    ]
    assert not gone


@pytest.mark.skipif(find_spec("megatron.training") is None, reason="this Megatron is its core alone")
def test_the_record_is_what_the_installed_parser_has():
    from mindspeed_dsa.patches import versions

    release = str(versions.of_megatron())
    installed = megatron_flags.add_installed(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    parser = set(megatron_flags.of_parser(installed))
    if release in megatron_flags.releases():
        recorded = megatron_flags.add_recorded(
            argparse.ArgumentParser(add_help=False, allow_abbrev=False), Version(release)
        )
        assert dict(megatron_flags.described(installed)) == dict(megatron_flags.described(recorded))
    for row in ROWS:
        if row.verdict == "megatron" and row.now not in own_flags():
            assert row.now in parser or megatron_flags.lacks(row.now, Version(release)), row.now


def test_a_release_between_recorded_ones_counts_as_the_older(tmp_path):
    assert megatron_flags.lacks("--moe-shared-expert-gate", Version("0.15.3")) == "0.16.1 and later"
    assert not megatron_flags.lacks("--moe-shared-expert-gate", Version("0.17.0"))
    assert megatron_flags.lacks("--use-legacy-models", None) == "0.12.1 to 0.16.1"
    assert not megatron_flags.lacks("--no-such-flag", None)
    file = tmp_path / "record.json"
    switched_off = {"action": "store_false"}
    for release, flags in (
        ("0.9.0", {"--a": {}}),
        (
            "0.16.1",
            {"--a": {"type": int, "default": 2, "choices": (1, 2)}, "--no-b": {"action": "store_false"}},
        ),
        ("0.9.0", {"--no-b": switched_off, "--c": {"nargs": "+", "dest": "d"}}),
        ("0.18.0", {"--a": {"type": int, "default": 3, "choices": (1, 2)}}),
    ):
        parser = argparse.ArgumentParser(add_help=False)
        for name, options in flags.items():
            parser.add_argument(name, **options)
        megatron_flags.add(release, parser, file)
    assert json.loads(file.read_text()) == {
        "releases": ["0.9.0", "0.16.1", "0.18.0"],
        "flags": {
            "--a": [
                ["010", "int", {"choices": [1, 2], "default": 2}],
                ["001", "int", {"choices": [1, 2], "default": 3}],
            ],
            "--c": [["100", "str", {"dest": "d", "nargs": "+"}]],
            "--no-b": [["110", "off"]],
        },
    }


def test_a_parser_from_the_record_has_types_choices_and_defaults():
    def parser(release):
        made = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        return megatron_flags.add_recorded(made, Version(release))

    line = "--num-layers 2 --moe-layer-freq ([0]*1+[1]*1) --no-rope-fusion --lr 1e-3".split()
    args = parser("0.16.1").parse_args(line)
    assert (args.num_layers, args.moe_layer_freq, args.lr) == (2, [0, 1], 1e-3)
    assert (args.apply_rope_fusion, args.transformer_impl) == (False, "transformer_engine")
    assert parser("0.16.1").parse_args([]).apply_rope_fusion
    assert parser("0.14.0").parse_args([]).mscale_all_dim == 0.0
    assert parser("0.12.1").parse_args([]).mscale_all_dim == 1.0
    with pytest.raises(argparse.ArgumentError, match="invalid choice"):
        parser("0.16.1").parse_args(["--optimizer", "adm"])
    # Between recorded releases, flags of the newer one may or may not exist.
    assert "--cuda-graph-modules" not in parser("0.16.1")._option_string_actions
    assert "--cuda-graph-modules" in parser("0.17.1")._option_string_actions
    assert "--use-legacy-models" not in parser("0.19.2")._option_string_actions


def added_flags(folder: Path) -> set[str]:
    """Return the flags that ``add_argument`` adds anywhere in a folder's sources."""
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
