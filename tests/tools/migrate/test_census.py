"""All launch scripts of MindSpeed-LLM: refused flags, and Megatron-LM's parser on the others."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

from mindspeed_dsa.tools.migrate import scripts
from mindspeed_dsa.tools.migrate.job import Given
from mindspeed_dsa.tools.migrate.translate import Translation, words
from tests.tools.migrate import census
from tests.tools.migrate.test_training import without_unset

PATHS = {"--load", "--save", "--data-path", "--tokenizer-model", "--vocab-file", "--merge-file"}
"""Flags for which scripts have a sentence that asks for a path."""
ELSEWHERE = {"--use-ascend-mc2", "--load-hf"}
"""Flags that need a machine with devices, or a model's files."""

ALONE = {"--enable-hf2mg-convert", "--fix-router"}
"""Refused flags whose removal leaves a complete job."""

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not {"MEGATRON_LM", "MINDSPEED_LLM"} <= set(os.environ),
        reason="MEGATRON_LM, MINDSPEED_LLM name no checkouts",
    ),
]


@pytest.fixture(scope="module")
def translations() -> census.Translations:
    return census.translated()


def test_the_pages_have_what_is_refused(translations: census.Translations) -> None:
    """To update the tables, run ``python -m tests.tools.migrate.census``."""
    assert not [name for found in translations.values() for name, each in found if each.problems]
    for page, text in census.pages(translations).items():
        assert page.read_text(encoding="utf-8") == text, page


def test_new_flags_stand_where_the_old_ones_stood(tmp_path: Path) -> None:
    """In all scripts, for the oldest release and the newest one."""
    for kind in census.FOLDERS:
        for path in census.paths(kind):
            for release in ("0.12.1", "0.19.0"):
                assert "have no effect" not in scripts.migrate(path, Version(release)).text, (path, release)


def test_other_scripts_have_a_place() -> None:
    """These are scripts that convert weights, prepare data, run a model or train by FSDP2."""
    folder = census.checkout() / "examples"
    names = ("ckpt", "convert", "data", "generate", "evaluate", "chat")
    paths = [path for path in folder.rglob("*.sh") if path.name.partition("_")[0] in names]
    paths += (folder / "fsdp2").rglob("*.yaml")
    assert len(paths) > 100
    assert [path for path in paths if not scripts.migrate(path).instead] == []


def served(translation: Translation) -> Iterator[Given]:
    """Yield a new command's flags without refused ones, with a path where one is requested."""
    left_out = {outcome.given.flag for outcome in translation.refused} | ELSEWHERE
    for flag in translation.flags:
        if flag.flag in PATHS and len(flag.values) > 1:
            yield Given(flag.flag, ("somewhere",))
        elif flag.flag not in left_out:
            yield without_unset(flag)


def ranks(flags: list[Given]) -> int:
    """Return the least number of ranks for the layout."""
    sizes = {given.flag: int(given.value) for given in flags if given.value.isdigit()}
    tp, pp, cp, ep = (
        sizes.get(f"--{kind}-parallel-size", 1)
        for kind in ("tensor-model", "pipeline-model", "context", "expert-model")
    )
    return pp * math.lcm(tp * cp, ep * sizes.get("--expert-tensor-parallel-size", tp))


def test_megatrons_parser_takes_the_rest(translations: census.Translations) -> None:
    names, cases = [], []
    for kind, found in translations.items():
        for name, translation in found:
            if {outcome.given.flag for outcome in translation.refused} - ALONE or translation.of("unknown"):
                continue
            flags = list(served(translation))
            names.append(f"{kind}/{name}")
            cases.append((words(flags), ranks(flags)))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    paths = [os.environ["MEGATRON_LM"], str(census.ROOT), os.environ.get("PYTHONPATH")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.migrate.parsed"],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        cwd=census.ROOT,
        env={**environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        timeout=1700,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    stopped = dict(zip(names, map(json.loads, done.stdout.splitlines()), strict=True))
    # Packed documents on context parallel ranks need Transformer Engine, which may be missing.
    assert {
        name: why for name, why in stopped.items() if why and "without Transformer Engine" not in why
    } == {}
