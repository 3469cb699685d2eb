"""Commands on the pages: those that train nothing are parsed or run, and flags of training are checked.

Flags go through what ``doctor -- pretrain_gpt.py FLAGS`` asks, with the defaults of each recorded release of
Megatron-LM, on top of a small job for what a page leaves out.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from dsa_job.arguments import build_parser

from mindspeed_dsa import session
from mindspeed_dsa.__main__ import main
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.errors import MindSpeedDSAError
from mindspeed_dsa.session.session import Session
from mindspeed_dsa.tools.cli import doctor_arguments
from mindspeed_dsa.tools.migrate import megatron_flags

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.M | re.S)
ARRAY = re.compile(r"^\w+=\(.*?\)$", re.M | re.S)
ASSIGNED = re.compile(r"^(\w+)=(?:\((.*)\)|\"(.*)\")$")
JOB = shlex.split(
    "--num-layers 8 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 16 --seq-length 4096 "
    "--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --swiglu "
    "--disable-bias-linear --position-embedding-type rope --normalization RMSNorm "
    "--untie-embeddings-and-output-weights --num-experts 8 --moe-token-dispatcher-type alltoall "
    "--transformer-impl local --attention-dropout 0 --hidden-dropout 0 --train-iters 10 --lr 1e-4"
)
DSA = shlex.split(
    "--multi-latent-attention --experimental-attention-variant dsa --dsa-indexer-n-heads 64 "
    "--dsa-indexer-head-dim 128 --dsa-indexer-topk 2048"
)
ARGS = re.compile(r'ARGS="([^"]*)"')
PLUGIN = {"--log-router-load": 0, "--router-load-interval": 1}
"""Flags of the example plug-in, which its page installs first, and how many values they have."""
REFUSED = (
    # flags, releases, what is said
    ("--context-parallel-algo whole_sequences", "", "is unknown"),  # the page registers it first
    ("--load-hf HF_DIR", "", "HF_DIR cannot be read"),
    ("--dsa-replay-selections", "", "holds no recorded selections"),
    ("--moe-expert-placement placement.json", "", "there is no file placement.json"),
    ("--step-metrics-file", "", "megatron.training"),
    ("--seq-length 125", "0.12.1 0.14.0", "is not divisible"),
    ("--yarn-original-max-position-embeddings", "0.12.1", "say it there"),
    ("--override-opt-param-scheduler", "0.12.1 0.14.0", "is a flag neither of this library nor"),
    ("--rope-type", "0.12.1", "--rope-type is a flag neither"),
    ("--rope-type", "0.12.1", "shifts the labels of multi-token prediction"),
    ("--schedules-method dualpipev", "0.12.1", "needs megatron-core >=0.14"),
    ("--moe-fb-overlap", "0.12.1", "needs megatron-core >=0.14"),
    ("--moe-expert-placement", "0.12.1", "needs megatron-core >=0.13"),
    ("--use-torch-fsdp2", "0.12.1 0.14.0", "needs megatron-core >=0.16"),
    ("--sft-mask-prompts", "0.12.1 0.14.0 0.16.1", "needs megatron-core >=0.17"),
)
"""Flags that a page gives and that are refused: with files and hosts that are not here, or in older releases,
as the page says."""


def commands(page: Path) -> Iterator[str]:
    """Yield the lines of a page's shell blocks: continued ones joined, comments cut, variables put in."""
    variables: dict[str, str] = {}
    for _, language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language not in ("", "bash"):
            continue
        block = ARRAY.sub(lambda found: found[0].replace("\n", " "), block)
        lines = [re.sub(r"(^|\s+)#.*$", "", each).strip() for each in block.replace("\\\n", " ").splitlines()]
        if all(line.startswith("--") for line in lines):  # flags, over several lines
            lines = [" ".join(lines)]
        for line in filter(None, lines):
            assigned = ASSIGNED.match(line)
            for name, value in variables.items():
                line = line.replace(f'"${{{name}[@]}}"', value).replace(f"${name}", value)
            if assigned:
                variables[assigned[1]] = re.sub(r'"\$\{\w+\[@\]\}"', "", assigned[2] or assigned[3])
            else:
                yield re.sub(r'"\$\{\w+\[@\]\}"', "", line)


def words_of(text: str) -> list[str]:
    """Return the words of a command, without dots, brackets of optional parts, and the plug-in's flags."""
    words = [word.strip("[]") for word in shlex.split(text) if word.strip("[]") not in ("...", "")]
    for flag, values in PLUGIN.items():
        if flag in words:
            at = words.index(flag)
            del words[at : at + 1 + values]
    return words


def flags_of_training(line: str) -> list[str] | None:
    """Return the flags of a command that trains with Megatron-LM's parser; None of others."""
    if line.startswith("python -m mindspeed_dsa"):
        line = line.partition(" -- ")[2]
    found = re.search(r"(?:^|pretrain_gpt\.py|pretrain_gpt_\w+\.sh|^\.\.\.)\s+(--.*|\.\.\. .*|$)", line)
    if line.startswith("--"):
        return words_of(line)
    return words_of(found[1]) if found and line else None


LINES = {page: list(commands(page)) for page in PAGES}
TRAINING = list(
    dict.fromkeys(
        tuple(flags) for lines in LINES.values() for line in lines if (flags := flags_of_training(line))
    )
)


def beginning(*starts: str) -> list[str]:
    """Return the commands of all pages that begin so, each once, without the beginning."""
    found = (line for lines in LINES.values() for line in lines)
    return list(
        dict.fromkeys(
            line.removeprefix(start).strip() for line in found for start in starts if line.startswith(start)
        )
    )


# -- training ----------------------------------------------------------------------------------


def problems_of(flags: list[str]) -> list[str]:
    """Return what ``doctor`` finds in flags of Megatron-LM's script, without patching anything."""
    try:
        running = Session(*session.resolve({}, flags))
        parser = doctor_arguments.parser_of(running)
        unknown = doctor_arguments.unknown_flags(flags, [], parser, "megatron")
        args, refused = doctor_arguments.read(parser, running, flags, whole=True)
        running.rewrite(args)
        doctor_arguments.derive(args)
        return unknown + refused + running.problems(args)
    except MindSpeedDSAError as error:
        return [str(error)]


@pytest.fixture(params=megatron_flags.releases())
def release(request, monkeypatch):
    """Let a recorded release of Megatron-LM be the one that is installed."""
    monkeypatch.setattr(versions, "_written", lambda root: request.param)
    monkeypatch.setattr(megatron_flags, "add_installed", lambda parser, root: 1 / 0)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return request.param


def expected(flags: str, release: str) -> list[str]:
    return [said for given, releases, said in REFUSED if given in flags and release in (releases or release)]


def test_flags_of_pages_are_taken_or_refused_as_the_page_says(release):
    wrong = []
    for flags in TRAINING:
        if "--accept-mindspeed-flags" in flags:
            continue
        line = " ".join(flags)
        has_dsa = "--use-fused-dsa" in flags or "dsa" in flags or "--dsa-" in line
        job = [*JOB, *(DSA if has_dsa else ()), *flags]
        found, wanted = problems_of(job), expected(line, release)
        wrong += [f"{line}: {each}" for each in found if not any(said in each for said in wanted)]
        if wanted and not found:
            wrong.append(f"{line}: is taken by {release}, and the page says that it is not: {wanted}")
    assert not wrong


def test_a_flag_that_is_refused_by_default_would_be_found(release):
    """As RoPE fusion was, and `--dsa-absorb`."""
    assert problems_of([*JOB, *DSA, "--dsa-absorb"])
    assert any(
        "Transformer Engine" in each
        for each in problems_of([*JOB, *DSA, "--transformer-impl", "transformer_engine"])
    )
    assert not problems_of([*JOB, *DSA])


def test_flags_of_the_example_job_are_its_own():
    lines = [line for lines in LINES.values() for line in lines if "pretrain_dsa.py" in line]
    lines = [line.rpartition("pretrain_dsa.py")[2] for line in lines if "mindspeed_dsa plan" not in line]
    lines += [found[1] for found in map(ARGS.search, beginning("make train")) if found]
    assert len(lines) > 20
    for line in dict.fromkeys(lines):
        build_parser().parse_args(words_of(line))


# -- commands ----------------------------------------------------------------------------------

OURS = beginning("python -m mindspeed_dsa", "torchrun --nproc-per-node 8 -m mindspeed_dsa")
RUN = {"explain": (0,), "features": (0,), "plan": (0, 1)}
"""Commands that need no file and take no time, with exit statuses: a plan that does not fit ends with 1."""


class Parsed(Exception):
    """A command has read its command line."""


@pytest.fixture
def is_taken(monkeypatch):
    """Return a function that says whether a command's own parser takes words; the command does nothing."""
    within = []
    of = argparse.ArgumentParser

    def reading(original):
        def parse(self, args=None, namespace=None):
            within.append(self)
            try:
                result = original(self, args, namespace)
            finally:
                within.pop()
            if not within and self.prog.startswith("python -m mindspeed_dsa "):
                raise Parsed
            return result

        return parse

    monkeypatch.setattr(of, "parse_args", reading(of.parse_args))
    monkeypatch.setattr(of, "parse_known_args", reading(of.parse_known_args))

    def ask(words):
        try:
            main(words)
        except Parsed:
            return True
        except SystemExit:
            return False
        return False

    return ask


def test_options_of_commands_are_known(is_taken, capsys):
    lines = [line for line in OURS if line.split()[0] not in ("doctor", "explain")]
    assert len(lines) > 20
    for line in lines:
        assert is_taken([word.partition("|")[0] for word in words_of(line)]), (line, capsys.readouterr().err)
    assert not is_taken(["hang", "--folder", "runs"])


@pytest.mark.parametrize(
    "line",
    [line for line in OURS if line.split()[0] in RUN and not re.search(r"FLAGS|router-load", line)],
)
def test_commands_that_train_nothing_run(monkeypatch, capsys, tmp_path, line):
    monkeypatch.chdir(tmp_path)
    assert main(words_of(line)) in RUN[line.split()[0]], capsys.readouterr().err


def test_flags_behind_doctor_are_known():
    lines = [line.removeprefix("doctor").strip() for line in OURS if line.startswith("doctor")]
    assert len(lines) > 4
    for line in lines:
        words = [word for word in words_of(line) if word not in ("FLAGS", "--job", "--device")]
        running = Session(*session.resolve({}, words))
        assert not doctor_arguments.unknown_flags(
            words, words, doctor_arguments.parser_of(running), "megatron"
        )


def test_targets_of_make_and_extras_of_pip_are_there():
    makefile, setup = ((ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "setup.py"))
    for line in beginning("make "):
        assert (
            re.search(rf"^{re.escape(line.split()[0].partition('=')[0])}:", makefile, flags=re.M)
            or line[0].isupper()
        ), line
    extras = {
        extra
        for line in beginning("pip install")
        for found in re.findall(r"\[([\w,]+)\]", line)
        for extra in found.split(",")
    }
    assert extras
    for extra in extras:
        assert f'"{extra}"' in setup, extra


def test_cases_of_benchmarks_are_there():
    from benchmarks.__main__ import CASES

    for line in beginning("python -m benchmarks"):
        name = line.split()[0]
        assert name == "CASE" or name in CASES, line
