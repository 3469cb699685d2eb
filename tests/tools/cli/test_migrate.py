"""``migrate``, as typed by a user."""

from __future__ import annotations

import json

import pytest

from mindspeed_dsa.__main__ import main
from mindspeed_dsa.tools.migrate.translate import table
from tests.tools.cli.test_commands import JOB, LINE, run_script


@pytest.fixture
def script(tmp_path):
    def write(flags, name="train.sh"):
        path = tmp_path / name
        path.write_text(f"torchrun pretrain_gpt.py {flags}\n")
        return str(path)

    return write


@pytest.mark.parametrize(
    ("flags", "status", "printed"),
    [
        (
            "--qk-rope-head-dim 64 --bf16",
            0,
            "2 flags: 1 Megatron's name now, 1 unchanged",
        ),
        ("--fix-router", 1, "1 not served (1 of them change results)"),
        ("--no-such-flag", 1, "Neither MindSpeed's nor Megatron's"),
        ("--no-such-flag", 1, "serve all flags but the unknown ones"),
        ("--qk-rope-head-dim 8 --qk-pos-emb-head-dim 16", 2, "PROBLEM: --qk-rope-head-dim 8 means"),
    ],
)
def test_flag_by_flag(script, tmp_path, capsys, flags, status, printed):
    path = script(flags)
    assert main(["migrate", "--megatron", "0.16.1", path]) == status
    out = capsys.readouterr().out
    assert printed in out
    new = tmp_path / "train.mindspeed_dsa.sh"
    assert new.exists() == (status != 2)
    assert (f"written: {new}" in out) == (status != 2)


def test_verdicts_in_chinese_on_a_screen(script, capsys):
    path = script("--qk-rope-head-dim 64 --bf16 --fix-router")
    assert main(["migrate", "--megatron", "0.16.1", "--dry-run", "--lang", "zh", path]) == 1
    out = capsys.readouterr().out
    assert "3 个参数：换成 Megatron 的参数 1 个，不变 1 个，不支持 1 个（其中 1 个会改变结果）" in out  # noqa: RUF001
    row = next(line for line in out.splitlines() if line.startswith("--fix-router"))
    assert "不支持（结果会变）" in row  # noqa: RUF001
    assert max(map(len, out.splitlines())) <= 150


def test_json_of_several_scripts(script, tmp_path, capsys):
    paths = [script("--use-ascend-coc", "a.sh"), script("--n-group 2", "b.sh")]
    assert main(["migrate", "--dry-run", "--json", *paths]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [each["counts"]["flags"] for each in record["scripts"]] == [1, 1]
    assert record["scripts"][1]["flags"][0] == {
        "flag": "--n-group",
        "values": ["2"],
        "verdict": "megatron",
        "now": "--moe-router-num-groups 2",
        "why": "",
        "changes_results": False,
    }
    assert record["scripts"][1]["command"] == ["--moe-router-num-groups", "2"]
    assert len(list(tmp_path.iterdir())) == 2


def test_the_verdict_of_every_flag(capsys):
    assert main(["migrate", "--flags"]) == 0
    lines = capsys.readouterr().out.splitlines()
    flags = [line for line in lines if line.startswith("--")]
    assert len(flags) == len(table())
    assert max(map(len, lines)) <= 120
    assert any(line.startswith("--fix-router") and "NOT SERVED" in line for line in flags)
    at = next(number for number, line in enumerate(lines) if line.startswith("--tp-2d "))
    assert lines[at + 1].startswith("    Two-dimensional tensor parallelism is not here")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "name a script"),
        (["none.sh"], "none.sh cannot be read"),
        (["--megatron", "newest", "none.sh"], "give a release, such as 0.16.1"),
        (["--megatrn", "0.16.1", "none.sh"], "it takes no --megatrn; did you mean --megatron?"),
    ],
)
def test_bad_input_is_one_line(capsys, argv, said):
    assert main(["migrate", *argv]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


ACCEPT = "--accept-mindspeed-flags --num-layers 3 --shape-order SBH".split()


def test_the_one_liner_takes_a_command_line_of_mindspeed(tmp_path):
    """This small Megatron's parser knows only --num-layers, and refuses leftovers of other flags."""
    done = run_script(tmp_path, [LINE, JOB, "print(args.num_layers)"], *ACCEPT)
    assert done.stdout.split() == ["3"], done.stderr
    assert "not needed here: --shape-order" in done.stderr


def test_the_one_liner_refuses_what_would_change_results(tmp_path):
    done = run_script(tmp_path, [LINE, JOB, "print('went on')"], *ACCEPT, "--fix-router", "--kv-compress")
    assert done.returncode != 0
    assert "went on" not in done.stdout
    assert "Traceback" not in done.stderr
    assert "\n  - --fix-router: " in done.stderr
    assert "\n  - --kv-compress: " in done.stderr
