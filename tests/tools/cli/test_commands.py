"""The commands, as typed by a user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mindspeed_dsa.__main__ import main
from mindspeed_dsa.feature import Feature
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.spec import Patch
from mindspeed_dsa.tools.cli import overview
from mindspeed_dsa.tools.cli.overview import COMMANDS
from tests.support import fork, warm


def command(*argv):
    return warm.run(
        [sys.executable, "-m", "mindspeed_dsa", *argv], capture_output=True, text=True, timeout=120
    )


def test_every_command_is_there_and_explains_itself(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    for name in COMMANDS:
        assert name in printed
        with pytest.raises(SystemExit) as status:
            main([name, "--help"])
        assert status.value.code == 0
        assert f"mindspeed_dsa {name}" in capsys.readouterr().out


def test_an_unknown_command_is_refused(capsys):
    assert main(["docter"]) == 2
    assert "docter" in capsys.readouterr().err


def test_features_name_what_switches_them_on(capsys):
    assert main(["features"]) == 0
    lines = {
        line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines() if "--" in line
    }
    assert lines["fsdp2"] == "--use-torch-fsdp2"
    assert lines["flash-attention"] == "--use-flash-attn"
    assert lines["moe-grouped-gemm"] == "--moe-grouped-gemm"
    assert lines["swap-optimizer"] == "--swap-optimizer"
    assert "dsa-context-parallel" not in lines  # automatic


def test_a_reader_that_stops_early_sees_no_traceback():
    command = f"{sys.executable} -m mindspeed_dsa features | true"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_explain_by_flag_environment_and_feature(capsys):
    for name in ("--mindspeed-platform", "MINDSPEED_DSA_MINDSPEED_PLATFORM", "mindspeed_platform"):
        assert main(["explain", name]) == 0
        assert "--mindspeed-platform" in capsys.readouterr().out
    assert main(["explain", "verify-before-model"]) == 0
    assert "LanguageModule.__init__" in capsys.readouterr().out
    assert main(["explain", "verify-before-modell"]) == 2
    assert "did you mean verify-before-model?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("--use-fused-dsa", "explain fused-dsa"),
        ("--experimental-attention-variant", "read by"),
        ("MINDSPEED_DSA_USE_FUSED_DSA", "--use-fused-dsa"),
        ("swap", "swap-optimizer: "),
        ("npu", "npu-platform: "),
        ("Streams", "--two-streams: "),
        ("fork", "mindspeed_dsa diff: "),
        ("fork", "mindspeed_dsa doctor: "),
        ("Fork", "docs/megatron_lm.md: Eight GPUs, your fork"),
        ("dsa", "docs/features/fused-dsa.md"),
    ],
)
def test_explain_fits_a_screen(capsys, name, said):
    assert main(["explain", name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(said in line for line in lines)
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 120


def test_explain_does_without_pages(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(overview, "DOCS", tmp_path / "docs")
    assert main(["explain", "fork"]) == 0
    assert "docs/" not in capsys.readouterr().out


def test_doctor_lists_every_feature_when_all_are_off():
    from mindspeed_dsa.features import all_features

    done = command("doctor", "--json")
    findings = json.loads(done.stdout)
    assert done.returncode == 0, findings["problems"]
    assert set(findings) == {
        *"versions megatron beside platform layers features operators changes sites".split(),
        *"environment problems notes".split(),
    }
    assert [row["name"] for row in findings["features"]] == [f.name for f in all_features()]
    assert findings["versions"]["megatron-core"]


def test_doctor_with_dsa_patches_for_real():
    done = command("doctor", "--json", "--experimental-attention-variant", "dsa")
    findings = json.loads(done.stdout)
    assert done.returncode == 0, findings["problems"]
    states = {site["target"]: site["state"] for site in findings["sites"]}
    assert any(".dsa:" in target and state == "applied" for target, state in states.items())
    repair = next(row for row in findings["features"] if row["name"] == "dsa-repairs")
    assert repair["on"]
    assert repair["set_by"] == "argv (--experimental-attention-variant)"


@pytest.mark.full
def test_doctor_reports_a_problem_with_status_1():
    done = command("doctor", "--experimental-attention-variant", "dsa", "--no-dsa-repars")
    assert done.returncode == 1
    assert "did you mean --no-dsa-repairs?" in " ".join(done.stdout.split())


def test_doctor_says_why_nothing_is_decided():
    from mindspeed_dsa.tools.cli import doctor

    text = " ".join(doctor.as_text(doctor.examine(["--swap-optimizer", "--reuse-fp32-param"])).split())
    assert "swap-optimizer (switched on by argv (--swap-optimizer)) cannot be combined with" in text
    assert "features: not resolved because of the problem above" in text
    assert "unknown" not in text.replace("platform unknown", "")


@pytest.mark.parametrize(
    "model",
    [
        (
            "--dsa-indexer-topk-freq 4 --dsa-indexer-skip-topk-offset 3 --dsa-indexer-n-heads 32 "
            "--dsa-indexer-head-dim 128 --dsa-indexer-topk 2048"
        ),
        "--dsa-model glm-5.3",
    ],
)
def test_doctor_reads_a_job_with_shared_selections_behind_its_script(model):
    from mindspeed_dsa.tools.cli import doctor

    job = (
        f"-- pretrain_gpt.py --experimental-attention-variant dsa --num-layers 78 {model} "
        "--mtp-num-layers 1 --pipeline-model-parallel-size 2 --my-own 3 --multi-latent-attention "
        "--transformer-impl local"
    )
    findings = doctor.examine(job.split())
    assert findings["layers"] == (
        "21 of 78 layers (1-3, 7, 11, ..., 75) of the decoder select keys, and 1 of 1 of multi-token "
        "prediction; the others attend to keys selected below"
    )
    assert f"layers: {findings['layers']}" in " ".join(doctor.as_text(findings).split())
    (problem,) = findings["problems"]
    assert "begins with layer 40" in problem
    assert "--decoder-last-pipeline-num-layers 40" in problem


def test_doctor_names_a_row_without_a_target_that_a_job_starts_without():
    """Only in a release that the feature serves, and only if the row's package is installed."""
    from mindspeed_dsa.tools.cli import doctor

    rows = [
        Patch(f"{module}:gone", "wrap", "impl:f", "hands out labels", versions=versions, required=False)
        for module, versions in (
            ("megatron.core.utils", ""),
            ("megatron.core.parallel_state", "<0.12"),
            ("megatron.training_of_nobody.utils", ""),
            ("torch.cuda", ""),
        )
    ]
    settings = SimpleNamespace(megatron_root="megatron")
    running = SimpleNamespace(settings=settings, features=[Feature("f", "does f", patches=tuple(rows))])
    (said,) = doctor._without_target(running)
    assert said.startswith("f: megatron.core.utils:gone does not exist")
    assert "hands out labels, which is not done with this Megatron" in said


@pytest.mark.parametrize("before", ["", "--", "-- pretrain_gpt.py"])
@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--dsa-indexer-topk-frequency 4", "did you mean --dsa-indexer-topk-freq"),
        ("--index-topk-patern=CS", "did you mean --index-topk-pattern"),
        ("--no-dsa-indexer-scoring-rel", "did you mean --no-dsa-indexer-scoring-relu"),
    ],
)
def test_doctor_finds_flags_of_dsa_that_nobody_knows(before, flag, hint):
    from mindspeed_dsa.tools.cli import doctor, doctor_arguments

    read, of_the_job = doctor.read_and_beside(f"{before} {flag} --my-own 3 --num-layers 2".split())
    parser = doctor_arguments.parser_of(None)
    problems = doctor_arguments.unknown_flags(read, of_the_job, parser, "megatron")
    (problem,) = (each for each in problems if flag.split()[0].split("=")[0] in each)
    assert hint in problem
    assert len(problems) == (1 if before else 2), "flags of the job's own parser belong behind --"


def test_doctor_knows_which_release_lacks_a_flag():
    from mindspeed_dsa.tools.cli import doctor_arguments

    parser = doctor_arguments.parser_of(None)
    (problem,) = doctor_arguments.unknown_flags(["--cuda-graph-modules"], [], parser, "megatron")
    assert "Megatron-LM 0.16.1; Megatron-LM 0.19.0 and later has it" in problem


def run_script(tmp_path, lines, *argv, run=warm.run):
    fork.write_training(tmp_path)
    path = tmp_path / "train.py"
    path.write_text("\n".join(lines))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    return run([sys.executable, str(path), *argv], capture_output=True, text=True, timeout=120, env=env)


LINE = "import mindspeed_dsa.megatron_adaptor"
JOB = "from megatron.training.initialize import initialize; args = initialize()"


@pytest.mark.parametrize(
    ("lines", "run"),
    [
        ([LINE, JOB], subprocess.run),
        pytest.param([LINE, JOB], warm.run, marks=pytest.mark.full),
        (["import megatron.training.initialize", LINE, JOB], warm.run),
        ([LINE, "import importlib; importlib.reload(mindspeed_dsa.megatron_adaptor)", LINE, JOB], warm.run),
    ],
    ids=["fresh", "before", "after", "twice"],
)
def test_the_one_liner_in_a_script(tmp_path, lines, run):
    done = run_script(
        tmp_path,
        [*lines, "print(args.num_layers, args.use_fused_dsa)"],
        *("--num-layers", "3", "--use-fused-dsa"),
        run=run,
    )
    assert done.stdout.split() == ["3", "True"], done.stderr


def test_the_one_liner_with_a_misspelt_flag(tmp_path):
    done = run_script(tmp_path, [LINE, JOB], "--use-fusd-dsa")
    assert done.returncode == 2
    assert "--use-fusd-dsa: did you mean --use-fused-dsa?" in done.stderr


def test_the_one_liner_shows_its_flags_in_help(tmp_path):
    done = run_script(tmp_path, [LINE, JOB], "--help")
    assert done.returncode == 0
    assert "--num-layers" in done.stdout
    assert "--use-fused-dsa" in done.stdout


def test_a_refused_switch_stops_the_script_with_one_clear_message(tmp_path):
    done = run_script(tmp_path, [LINE, JOB, "print('went on')"], "--mindspeed-platform", "npu")
    assert done.returncode != 0
    assert "went on" not in done.stdout
    assert "npu" in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_says_which_flags_nobody_knows():
    argv = ["--foo-bar-baz", "--num-layers", "4", "--num-layrs=4", "--no-use-dsa-absorb", "--", "--my-own"]
    done = command("doctor", "--json", *argv)
    assert done.returncode == 1
    problems = json.loads(done.stdout)["problems"]
    assert [problem.partition(" is ")[0] for problem in problems] == ["--foo-bar-baz", "--num-layrs"]
    assert "did you mean --num-layers?" in problems[1]


@pytest.mark.parametrize(
    "words",
    [
        ["explain", "--dsa-loss-gate"],
        ["explain", "dsa-loss-gate"],
        ["compare", "--features", "dsa-loss-gate"],
        ["plan", "--", "pretrain_gpt.py", "--no-dsa-loss-gate"],
    ],
    ids=" ".join,
)
def test_a_removed_name_has_its_way_out(capsys, words):
    assert main(words) == 2
    assert "was removed: " in (said := capsys.readouterr().err)
    assert "--no-dsa-repairs loss-gate" in said


def test_a_file_that_cannot_be_written_is_named(capsys, tmp_path):
    assert main(["schedule", "--png", str(tmp_path / "no" / "x.png")]) == 2
    assert (
        f"mindspeed_dsa schedule: {tmp_path}/no/x.png: No such file or directory" in capsys.readouterr().err
    )


def test_misspelt_commands_and_branches_of_releases(capsys):
    assert main(["doctr"]) == 2
    assert "did you mean doctor?" in capsys.readouterr().err
    assert versions.release("core_v0.16.1") == versions.release("0.16.1") == "0.16.1"
    assert main(["weights", "flags", "HF_DIR", "--megatron", "abc"]) == 2
    assert "invalid release value: 'abc'" in capsys.readouterr().err
