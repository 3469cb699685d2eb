"""Advice for a migrated script: the Megatron-LM release that has its flags, and the script to start."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.version import Version

from mindspeed_dsa.tools.migrate.job import Given
from mindspeed_dsa.tools.migrate.translate import translate

RELEASES = ("0.12.1", "0.16.1", "0.19.0")
"""Releases to compare: the base of MindSpeed-LLM's branches, and two with DSA."""
LINE = "import mindspeed_dsa.megatron_adaptor"
_OWN = "pretrain_gpt.py"
_POSTTRAINS = re.compile(r"\bposttrain_gpt\.py\b")
_IMPORT = re.compile(r"^[ \t]*((?:from|import)[ \t]+mindspeed(_llm)?\b(?!_).*)$", re.MULTILINE)
_ADAPTOR = re.compile(r"import (\w+\.)?megatron_adaptor|import mindspeed\.megatron_adaptor")


def lacking(flags: Sequence[Given]) -> dict[str, list[str]]:
    """Return for each release the script's flags that it lacks, and its problems with other flags."""
    translations = {release: translate(flags, Version(release)) for release in RELEASES}
    return {
        release: [
            *dict.fromkeys(outcome.given.flag for outcome in translation.refused),
            *(problem.partition(", and ")[0] for problem in translation.problems),
        ]
        for release, translation in translations.items()
    }


def sentence(lacks: Mapping[str, Sequence[str]], unknown: int) -> str:
    """Return one sentence about the Megatron-LM releases that serve the script.

    Args:
        lacks: result of :func:`lacking`.
        unknown: number of flags that are in no recorded release.
    """
    each_flag = "all flags but the unknown ones" if unknown else "all flags"
    whole = [f"core_v{release}" for release, flags in lacks.items() if not flags]
    others = [f"core_v{release} does not: {', '.join(flags)}" for release, flags in lacks.items() if flags]
    if whole:
        serve = "serve" if len(whole) > 1 else "serves"
        names = " and ".join(filter(None, [", ".join(whole[:-1]), whole[-1]]))
        return f"Megatron-LM: {names} {serve} {each_flag}{''.join(f'; {each}' for each in others)}"
    # The newest one of those with equally few problems.
    fewest = min(reversed(list(lacks)), key=lambda release: len(lacks[release]))
    return f"Megatron-LM: none of {', '.join(lacks)} serves {each_flag}; core_v{fewest} refuses fewest"


def clone(lacks: Mapping[str, Sequence[str]]) -> str:
    """Return the git command for Megatron-LM in the first release that has DSA and all flags."""
    # Without the first release, 0.12.1, which has no DSA.
    newer = list(lacks)[1:]
    release = next((release for release in newer if not lacks[release]), newer[-1])
    return f"git clone --branch core_v{release} https://github.com/NVIDIA/Megatron-LM"


def renamed(text: str, script: str) -> str:
    """Replace ``posttrain_gpt.py`` in a script by ``pretrain_gpt.py``, Megatron-LM's script for both."""
    return _POSTTRAINS.sub(_OWN, text) if _POSTTRAINS.search(script) else text


def program(path: Path, script: str, fetched_by: str) -> list[str]:
    """Return the steps to adapt the Python script that a launch script starts.

    Args:
        path: path of the launch script; its folder and the folders above are searched for the Python script.
        script: Python script as named in the launch script.
        fetched_by: command that fetches Megatron-LM.
    """
    if not script.endswith(".py"):
        return []
    take = f"take Megatron-LM's own {_OWN} (`{fetched_by}`), with `{LINE}` as its first line"
    for folder in (path.parent, *path.parents, Path()):
        if (folder / script).is_file():
            return _of_file(folder / script, take)
    if Path(script).name in (_OWN, "posttrain_gpt.py"):
        return [
            f"{script}: {take}; MindSpeed-LLM's imports MindSpeed-LLM in other lines too, and is of no use"
        ]
    return [f"{script}: `{LINE}` becomes its first line, in place of an import of MindSpeed's adaptor"]


def _of_file(file: Path, take: str) -> list[str]:
    text = file.read_text(encoding="utf-8", errors="replace")
    if LINE in text:
        return []
    imports = [
        (text.count("\n", 0, match.start(1)) + 1, match[1].strip()) for match in _IMPORT.finditer(text)
    ]
    others = [str(line) for line, imported in imports if not _ADAPTOR.search(imported)]
    if others:
        lines = "line" if len(others) == 1 else "lines"
        return [f"{file} cannot be used, for it imports MindSpeed in {lines} {', '.join(others)}: {take}"]
    if not imports:
        return [f"{file}: put `{LINE}` before its first import"]
    return [f"{file}, line {imports[0][0]}: `{imports[0][1]}` becomes `{LINE}`"]
