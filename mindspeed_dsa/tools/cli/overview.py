"""Table of all commands, and word search in command summaries and in titles of documentation pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

COMMANDS = {
    "try": "a minute of training: Megatron's own DSA beside the fused one, on a small model",
    "doctor": "the verdict on a command line: what is on and by what, what a fork changed, what patches what",
    "features": "all features with their switches",
    "explain": "one flag or feature: what it does, needs, excludes and patches",
    "diff": "static check of every patch target against a wheel, a version, a checkout or a fork",
    "compare": "the same job with and without named features, side by side",
    "checkpoints": "which checkpoints of a folder are whole, and which of them stay",
    "hang": "what every rank of a job that hangs waits for, from what --record-collectives wrote",
    "selections": "the keys that a run attended to, two recordings compared, which layers need an indexer",
    "experts": "the load of MoE experts that a run recorded, as a table and as a picture",
    "weights": "a Hugging Face model into a checkpoint of Megatron's, and back",
    "plan": "memory, communication and work of a layout, from its flags alone",
    "migrate": "launch scripts of MindSpeed and MindSpeed-LLM, flag by flag, and written anew",
    "schedule": "pipeline schedules simulated side by side, or a recorded step beside its simulation",
}
DOCS = Path(__file__).parents[3] / "docs"
"""Folder of the pages in a checkout; a wheel does not have it."""
_HEADING = re.compile(r"^#{1,3} (.+)$", re.M)
_CODE = re.compile(r"^```.*?^```", re.M | re.S)
_OTHER_LANGUAGES = "zh"
_MANY = 12


def commands_with(word: str) -> list[str]:
    """Return a line for each command with a word in its name or summary that starts with ``word``.

    Args:
        word: search word in lower case.
    """
    begins = _beginning(word)
    return [
        f"python -m mindspeed_dsa {name}: {summary}"
        for name, summary in COMMANDS.items()
        if begins(f"{name} {summary}")
    ]


def pages_with(word: str) -> list[str]:
    """Return the documentation pages with a matching title; up to 12 pages are listed with titles.

    Args:
        word: search word in lower case.
    """
    found = {page: list(filter(_beginning(word), _titles(page))) for page in _pages()}
    named = {f"docs/{page.relative_to(DOCS).as_posix()}": titles for page, titles in found.items() if titles}
    if len(named) > _MANY:
        return [f"pages: {', '.join(named)}"]
    return [f"{name}: {'; '.join(titles)}" for name, titles in named.items()]


def _beginning(word: str) -> Callable[[str], re.Match[str] | None]:
    return re.compile(rf"\b{re.escape(word)}", re.I).search


def _pages() -> Iterator[Path]:
    for page in sorted(DOCS.rglob("*.md")):
        if page.relative_to(DOCS).parts[0] != _OTHER_LANGUAGES:
            yield page


def _titles(page: Path) -> list[str]:
    # Without code blocks, where # begins a shell comment.
    return _HEADING.findall(_CODE.sub("", page.read_text(encoding="utf-8")))
