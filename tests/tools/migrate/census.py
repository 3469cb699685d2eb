"""Tables of the pages about MindSpeed, from the launch scripts of MindSpeed-LLM.

``MINDSPEED_LLM=DIR python -m tests.tools.migrate.census`` writes them; ``test_census.py`` compares.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

from packaging.version import Version

from mindspeed_dsa.tools.migrate import megatron_lm, scripts, shell
from mindspeed_dsa.tools.migrate.job import split
from mindspeed_dsa.tools.migrate.translate import KINDS, Translation

ROOT = Path(__file__).parents[3]
PAGES = {"en": ROOT / "docs" / "migrate.md", "zh": ROOT / "docs" / "zh" / "migrate.md"}
DESIGN = ROOT / "docs" / "design" / "migrate.md"
RELEASE = Version("0.16.1")
FOLDERS = {
    "pretrain": ("examples/mcore", "pretrain*.sh"),
    "tune": ("examples/mcore", "tune*.sh"),
    "poc": ("tests/poc", "*.sh"),
}
FLAGSHIPS = (
    "deepseek3/pretrain_deepseek3_671b_4k_A3_ptd.sh",
    "deepseek32/pretrain_deepseek32_671b_4k_A3_ptd.sh",
    "glm5/pretrain_glm5_744b_4k_A3_ptd.sh",
    "glm52/pretrain_glm52_744b_4k_A3_ptd.sh",
    "kimi2/pretrain_kimi2_18b_4k_8p_ptd.sh",
    "qwen3_moe/pretrain_qwen3_30b_a3b_4K_ptd.sh",
    "deepseek3/tune_deepseek3_671b_4k_full_A3_ptd.sh",
)
_HEADS = {
    "en": {
        "script": "script",
        "flags": "flags",
    },
    "zh": {
        "script": "脚本",
        "flags": "参数",
    },
}
_WHOLE = {"en": "whole", "zh": "全部支持"}
Translations = dict[str, list[tuple[str, Translation]]]


def checkout() -> Path:
    """Return the folder of MindSpeed-LLM in ``MINDSPEED_LLM``."""
    return Path(os.environ["MINDSPEED_LLM"])


def paths(kind: str) -> list[Path]:
    """Return the launch scripts of one kind, without those that the command has written."""
    folder, pattern = FOLDERS[kind]
    scripts_of_kind = sorted((checkout() / folder).rglob(pattern))
    return [path for path in scripts_of_kind if ".mindspeed_dsa." not in path.name]


def translated() -> Translations:
    """Return every script's name and its translation, by kind."""
    return {
        kind: [(path.name, scripts.migrate(path, RELEASE).translation) for path in paths(kind)]
        for kind in FOLDERS
    }


def census(translations: Translations) -> str:
    """Return the table of refused flags, the most frequent ones first."""
    counts = {
        kind: Counter(
            flag
            for _, translation in scripts_of_kind
            for flag in {outcome.given.flag for outcome in translation.refused}
        )
        for kind, scripts_of_kind in translations.items()
    }
    whole = sum(counts.values(), Counter[str]())
    columns = [f"{kind} ({len(scripts_of_kind)})" for kind, scripts_of_kind in translations.items()]
    lines = [f"| refused | {' | '.join(columns)} |", "| --- " * (len(counts) + 1) + "|"]
    for flag, _ in sorted(whole.items(), key=lambda item: (-item[1], item[0])):
        row = " | ".join(str(count[flag] or "") for count in counts.values())
        lines.append(f"| `{flag}` | {row} |")
    clean = [
        sum(not translation.refused for _, translation in scripts_of_kind)
        for scripts_of_kind in translations.values()
    ]
    return "\n".join([*lines, "| nothing | " + " | ".join(map(str, clean)) + " |"])


def releases(language: str = "en") -> str:
    """Return the table of scripts by release: whole, or the features that a release lacks."""
    heads = _HEADS[language]
    columns = [heads["script"], heads["flags"], *KINDS.values()]
    columns += [f"core_v{release}" for release in megatron_lm.RELEASES]
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for name in FLAGSHIPS:
        path = checkout() / "examples" / "mcore" / name
        start = shell.read(path.read_text(encoding="utf-8"))
        lacks = megatron_lm.lacking(split(start.words, start.written)[1])
        counts = scripts.migrate(path, RELEASE).translation.counts()
        cells = [f"`{path.name}`", str(counts["flags"]), *(str(counts[kind]) for kind in KINDS)]
        cells += [
            "; ".join(re.sub(r"--[\w-]+", r"`\g<0>`", each) for each in flags) or _WHOLE[language]
            for flags in lacks.values()
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def pages(translations: Translations) -> dict[Path, str]:
    """Return the pages with new tables."""
    filled_pages = {
        file: _filled(file.read_text(encoding="utf-8"), "releases", releases(language))
        for language, file in PAGES.items()
    }
    return {
        **filled_pages,
        DESIGN: _filled(DESIGN.read_text(encoding="utf-8"), "census", census(translations)),
    }


def _filled(text: str, name: str, table: str) -> str:
    block = rf"(<!-- {name}:begin -->\n).*?(\n<!-- {name}:end -->)"
    text, count = re.subn(block, lambda match: match[1] + table + match[2], text, flags=re.DOTALL)
    assert count == 1, name
    return text


if __name__ == "__main__":
    for file, text in pages(translated()).items():
        file.write_text(text, encoding="utf-8")
