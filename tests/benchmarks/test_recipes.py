"""Pages of recipes equal their plans, and their commands plan the same without ``--config``."""

from __future__ import annotations

import re
import shlex

import pytest

from benchmarks.plan import recipes
from mindspeed_dsa.tools.planner import arguments, command_lines, devices, flags, plan
from mindspeed_dsa.tools.planner.memory import GIB


@pytest.fixture(scope="module")
def written():
    return recipes.pages()


def test_the_pages_are_what_plans_say(written):
    files = [*recipes.DOCS.glob("recipes/*.md"), recipes.DOCS / "zh" / "recipes.md"]
    there = {file.relative_to(recipes.DOCS).as_posix(): file.read_text(encoding="utf-8") for file in files}
    assert there == written, "run python -m benchmarks.plan.recipes"


def test_every_model_has_a_cell_for_all_devices():
    found = recipes.recorded()
    assert found.keys() == recipes.MODELS.keys()
    for kinds in found.values():
        assert kinds.keys() == recipes.KINDS.keys()
        assert all(counts.keys() == {str(count) for count in recipes.COUNTS} for counts in kinds.values())


def expanded(words: list[str], arrays: dict[str, list[str]]) -> list[str]:
    """Return words with a shell's arrays expanded."""
    result = []
    for word in words:
        name = re.fullmatch(r"\$\{(\w+)\[@\]\}", word)
        result += arrays[name[1]] if name else [word]
    return result


@pytest.mark.parametrize("name", recipes.MODELS)
def test_commands_as_the_page_has_them_give_its_figures(name, written):
    """Both blocks are read as a shell does: arrays, and the flags of each command."""
    shared, *commands = re.findall(r"```\n(.*?)```", written[f"recipes/{name}.md"], re.DOTALL)
    arrays = {
        array: shlex.split(content)
        for array, content in re.findall(r"^(\w+)=\((.*?)\)$", shared, re.DOTALL | re.MULTILINE)
    }
    said = re.findall(
        r"^## (\d+) (.*)\n\n.*?: (fits|tight), ([\d.]+) GiB", written[f"recipes/{name}.md"], re.MULTILINE
    )
    kinds = {title: kind for kind, (title, _) in recipes.KINDS.items()}
    assert len(said) == len(commands) > 0
    for (count, title, verdict, needs), command in zip(said, commands, strict=True):
        words = expanded(shlex.split(command.replace("\\\n", " ")), arrays)
        start = words.index(arrays["RUN"][-1]) + 1
        nodes = int(words[words.index("--nnodes") + 1]) if "--nnodes" in words else 1
        assert nodes * int(words[words.index("--nproc-per-node") + 1]) == int(count)
        assert not flags.misspelt(words[start:])
        job = arguments.job_of(["pretrain_gpt.py", *words[start:]], int(count))
        made = plan.make(job, devices.device(kinds[title]), quick=True)
        assert made.verdict == verdict
        assert f"{made.worst.total / GIB:.1f}" == needs
        assert command_lines.FULL.split()[0] not in words or job.training.full < 0


def test_a_search_finds_the_layout_of_a_recipe_again():
    layout = recipes.recorded()["moonlight"]["h100"]["8"]
    assert recipes.searched("moonlight", "h100", 8) == layout
    assert recipes.searched("deepseek-v3", "h100", 8).startswith("TP4 EP8 DP2, needs ")
