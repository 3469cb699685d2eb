"""Commands on the pages: those that train nothing are parsed or run, and flags of training are checked.

Flags go through ``doctor -- pretrain_gpt.py FLAGS`` with the defaults of each recorded release of
Megatron-LM. A small job supplies the flags that a page leaves out.
"""

from __future__ import annotations

import argparse
import re

import pytest
from dsa_job.arguments import build_parser

from mindspeed_dsa import session
from mindspeed_dsa.__main__ import main
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.errors import MindSpeedDSAError
from mindspeed_dsa.platforms import host_pool
from mindspeed_dsa.session.session import Session
from mindspeed_dsa.tools.cli import doctor_arguments
from mindspeed_dsa.tools.migrate import megatron_flags
from tests.support.page_commands import (
    DSA,
    JOB,
    LINES,
    ROOT,
    beginning,
    jobs,
    words_of,
    wrong_answers,
)

ARGS = re.compile(r'ARGS="([^"]*)"')

# -- training ----------------------------------------------------------------------------------


def problems_of(flags: list[str]) -> list[str]:
    """Return ``doctor``'s problems with flags of Megatron-LM's script, without patching anything."""
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


RELEASES = megatron_flags.releases()


@pytest.fixture(params=RELEASES)
def release(request, monkeypatch):
    """Make a recorded release of Megatron-LM appear to be installed."""
    monkeypatch.setattr(versions, "_written", lambda root: request.param)
    monkeypatch.setattr(megatron_flags, "add_installed", lambda parser, root: 1 / 0)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    # Pages describe jobs on hosts larger than the one that runs the tests.
    monkeypatch.setattr(host_pool, "host_memory_free", lambda: 1 << 50)
    return request.param


@pytest.mark.parametrize(
    "release",
    [
        pytest.param(each, marks=() if each in ("0.16.1", RELEASES[-1]) else pytest.mark.full)
        for each in RELEASES
    ],
    indirect=True,
)
def test_flags_of_pages_are_taken_or_refused_as_the_page_says(release):
    wrong = [each for line, job in jobs() for each in wrong_answers(line, release, problems_of(job))]
    assert not wrong


def test_a_flag_that_is_refused_by_default_would_be_found(release):
    """RoPE fusion and `--dsa-absorb` were cases."""
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
"""Commands that need no file and little time, with exit statuses; 1 is for a plan that does not fit."""


class Parsed(Exception):
    """Signal that a command has parsed its command line."""


@pytest.fixture
def is_taken(monkeypatch):
    """Return a function that checks words with a command's own parser, and does nothing else."""
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
    (tmp_path / "examples").symlink_to(ROOT / "examples")
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


def test_the_profile_of_the_tuning_page_shows_operators(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/tuning.md").read_text(encoding="utf-8"), re.S)
    exec(block, {})
    assert "aten::addmm" in capsys.readouterr().out
