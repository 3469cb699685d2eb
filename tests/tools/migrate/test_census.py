"""All launch scripts of MindSpeed-LLM: what is refused, by flag, and Megatron-LM's parser on the rest.

The tables are those of ``docs/migrate.md``.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

from mindspeed_dsa.tools.migrate import scripts
from mindspeed_dsa.tools.migrate.job import Given
from mindspeed_dsa.tools.migrate.translate import Translation, words
from tests.tools.migrate.test_training import without_unset

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "migrate.md"
FOLDERS = {
    "pretrain": ("examples/mcore", "pretrain*.sh"),
    "tune": ("examples/mcore", "tune*.sh"),
    "poc": ("tests/poc", "*.sh"),
}
PATHS = {"--load", "--save", "--data-path", "--tokenizer-model", "--vocab-file", "--merge-file"}
"""Flags for which scripts have a sentence that asks for a path."""
ELSEWHERE = {"--use-ascend-mc2", "--load-hf"}
"""Flags of a machine with devices, and with a model's files."""

ALONE = {"--enable-hf2mg-convert", "--fix-router"}
"""Refused flags without which the rest of a script is a job."""

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not {"MEGATRON_LM", "MINDSPEED_LLM"} <= set(os.environ),
        reason="MEGATRON_LM, MINDSPEED_LLM name no checkouts",
    ),
]


@pytest.fixture(scope="module")
def translations() -> dict[str, list[tuple[str, Translation]]]:
    """By folder, every script's name and translation for Megatron-core 0.16.1."""
    checkout, release = Path(os.environ["MINDSPEED_LLM"]), Version("0.16.1")
    return {
        kind: [
            (path.name, scripts.migrate(path, release).translation)
            for path in sorted((checkout / folder).rglob(pattern))
            if ".mindspeed_dsa." not in path.name  # what the command has written beside one
        ]
        for kind, (folder, pattern) in FOLDERS.items()
    }


def table(translations: dict[str, list[tuple[str, Translation]]]) -> str:
    """Return the table of refused flags as the page has it, the most frequent ones first."""
    counts = {
        kind: Counter(flag for _, each in found for flag in {outcome.given.flag for outcome in each.refused})
        for kind, found in translations.items()
    }
    whole = sum(counts.values(), Counter[str]())
    heads = [f"{kind} ({len(found)})" for kind, found in translations.items()]
    lines = [f"| refused | {' | '.join(heads)} |"]
    lines.append("| --- " * (len(counts) + 1) + "|")
    for flag, _ in sorted(whole.items(), key=lambda item: (-item[1], item[0])):
        row = " | ".join(str(count[flag] or "") for count in counts.values())
        lines.append(f"| `{flag}` | {row} |")
    clean = [sum(not each.refused for _, each in found) for found in translations.values()]
    lines.append("| nothing | " + " | ".join(map(str, clean)) + " |")
    return "\n".join(lines)


def test_the_page_has_what_is_refused(translations: dict[str, list[tuple[str, Translation]]]) -> None:
    assert not [name for found in translations.values() for name, each in found if each.problems]
    assert table(translations) in PAGE.read_text(encoding="utf-8"), table(translations)


def served(translation: Translation) -> Iterator[Given]:
    """Yield the flags of a new command without those that are refused, with a path where one is asked for."""
    left_out = {outcome.given.flag for outcome in translation.refused} | ELSEWHERE
    for given in translation.flags:
        if given.flag in PATHS and len(given.values) > 1:
            yield Given(given.flag, ("somewhere",))
        elif given.flag not in left_out:
            yield without_unset(given)


def ranks(flags: list[Given]) -> int:
    """Return how many ranks the layout needs at least."""
    sizes = {given.flag: int(given.value) for given in flags if given.value.isdigit()}
    tp, pp, cp, ep = (
        sizes.get(f"--{kind}-parallel-size", 1)
        for kind in ("tensor-model", "pipeline-model", "context", "expert-model")
    )
    return pp * math.lcm(tp * cp, ep * sizes.get("--expert-tensor-parallel-size", tp))


def test_megatrons_parser_takes_the_rest(translations: dict[str, list[tuple[str, Translation]]]) -> None:
    names, cases = [], []
    for kind, found in translations.items():
        for name, each in found:
            if {outcome.given.flag for outcome in each.refused} - ALONE or each.of("unknown"):
                continue
            flags = list(served(each))
            names.append(f"{kind}/{name}")
            cases.append((words(flags), ranks(flags)))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    paths = [os.environ["MEGATRON_LM"], str(ROOT), os.environ.get("PYTHONPATH")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.migrate.parsed"],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        timeout=1700,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    stopped = dict(zip(names, map(json.loads, done.stdout.splitlines()), strict=True))
    # Packed documents on context parallel ranks are Transformer Engine's, which may be there or not.
    assert {
        name: why for name, why in stopped.items() if why and "without Transformer Engine" not in why
    } == {}
