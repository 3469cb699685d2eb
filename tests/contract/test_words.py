"""Sentences that are printed away from their code: each names its subject.

A feature's summary, the helps of its flags, and the reasons of its patches and conflicts appear in
``--help``, ``doctor``, ``explain``, error messages and the pages. ``help()`` prints docstrings.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import mindspeed_dsa
from mindspeed_dsa.feature import Feature
from mindspeed_dsa.features import shipped
from mindspeed_dsa.settings import GENERAL_FLAGS
from tests.support.sources import nodes_of

FOLDER = Path(mindspeed_dsa.__file__).parent

NO_SUBJECT = re.compile(r"(what|of|that|those|it|its|they|their|them|see|whether|which|whose|where)\b", re.I)
"""First words of sentences with a subject elsewhere, or with none."""
FRAGMENT = re.compile(r"(what|of|that|those|it|they|see)\b", re.I)
"""First words of docstrings that are neither an imperative nor a noun."""


def sentences(feature: Feature) -> Iterator[tuple[str, str]]:
    """Yield each sentence, with its place."""
    yield "summary", feature.summary
    for flag in feature.flags:
        yield f"help of {flag.name}", flag.help
    for patch in feature.patches:
        yield f"why of {patch.label}", patch.why
    for conflict in feature.conflicts:
        yield f"why of the conflict with {conflict.feature}", conflict.why


def is_wrong(sentence: str) -> bool:
    return NO_SUBJECT.match(sentence) is not None or len(sentence.split()) < 2


def fragments() -> list[str]:
    """Return the package's docstrings that begin with neither an imperative nor a noun."""
    wrong = []
    for path in sorted(FOLDER.rglob("*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if FRAGMENT.match(text):
                    name = getattr(node, "name", "module")
                    wrong.append(f"{path.relative_to(FOLDER)}: {name}: {text.splitlines()[0]}")
    return wrong


@pytest.mark.parametrize("feature", shipped(), ids=lambda feature: feature.name)
def test_sentences_name_their_subject(feature):
    wrong = [f"{where}: {text!r}" for where, text in sentences(feature) if is_wrong(text)]
    assert not wrong, "\n".join(["", *wrong])


def test_helps_of_general_flags_name_their_subject():
    assert not [flag.name for flag in GENERAL_FLAGS if is_wrong(flag.help)]


def test_docstrings_begin_with_a_verb_or_a_noun():
    wrong = fragments()
    assert not wrong, "\n".join(["", *wrong])


@pytest.mark.parametrize(
    "text", ["", "it does nothing", "Its weights are gathered by layer", "see above for it"]
)
def test_what_is_refused(text):
    assert is_wrong(text)
