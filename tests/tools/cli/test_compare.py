"""``compare`` on a job that writes a real job's files."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mindspeed_dsa
from mindspeed_dsa import Feature, Flag
from mindspeed_dsa.__main__ import main
from mindspeed_dsa.tools.compare import job, sides, text
from mindspeed_dsa.tools.compare.job import EXAMPLE, CommandJob, ExampleJob

JOB = str(Path(__file__).with_name("fake_job.py"))


@pytest.fixture
def compare(tmp_path, capsys, monkeypatch):
    """Run the command; return exit status, ``compare.json``, stdout and stderr. Draw if requested."""

    def run(*options, job=(JOB,), output="out", draws=False):
        if not draws:
            monkeypatch.setattr(text, "draw", lambda *unused: True)
        status = main(["compare", "--output-dir", str(tmp_path / output), *options, "--", *job])
        printed = capsys.readouterr()
        files = sorted(tmp_path.glob(f"{output}*/compare.json"), key=os.path.getmtime)
        return status, json.loads(files[-1].read_text()) if files else None, printed.out, printed.err

    return run


@pytest.fixture
def feature():
    """A feature with a plain switch and one with a tri-state switch."""
    names = [
        mindspeed_dsa.register(Feature(name, "test", (Flag(flag, "test", kind=kind, aliases=aliases),))).name
        for name, flag, kind, aliases in (
            ("faster", "--use-faster", "bool", ("--use-quicker",)),
            ("better", "--better", "auto", ()),
            ("larger", "--larger-by", "value", ()),
        )
    ]
    yield
    for name in names:
        mindspeed_dsa.unregister(name)


def test_both_sides_in_turn_with_medians_after_the_warm_up(compare, tmp_path):
    order = tmp_path / "order"
    status, report, out, err = compare(
        "--a",
        "",
        "--b=--step-time 0.05",
        "--repeats",
        "2",
        "--warmup-steps",
        "2",
        job=(JOB, "--order", str(order)),
        draws=True,
    )
    assert status == 0, err
    assert order.read_text().split() == ["A1", "B1", "A2", "B2"]
    times = report["measured"]["step_time_s"]
    assert (times["A"]["median"], times["B"]["median"]) == (0.1, 0.05)
    assert times["ratio"]["of_medians"] == 0.5
    assert times["ratio"]["within_noise"] is False
    assert report["measured"]["tokens_per_s"]["ratio"]["of_medians"] == 2.0
    assert report["measured"]["peak_memory_bytes"]["A"]["median"] == 6 * 2**20
    assert report["steps"] == {"A": 6, "B": 6, "left_out_of_times": 2}
    assert report["compared"]["lm_loss"]["first_step"] is None
    assert "indexer_loss" not in report["compared"], "neither side has one"
    assert "the first 2 step(s) of each run are warm-up" in out
    assert "loss: equal to the last bit at all 6 steps" in out
    assert Path(report["plot"]).read_bytes().startswith(b"\x89PNG")


def test_a_loss_that_departs_is_said_with_its_step(compare):
    status, found, out, _ = compare("--b=--drift-from 4")
    assert status == 0
    loss = found["compared"]["lm_loss"]
    assert loss["first_step"] == 4
    assert loss["max_abs"] == pytest.approx(0.03)
    assert loss["max_abs_step"] == 6
    assert loss["max_rel"] == pytest.approx(0.03 / 4.4)
    assert loss["last"] == pytest.approx([4.4, 4.43])
    assert "loss: DIFFERS from step 4 on; largest difference 0.03 at step 6" in out
    assert "gradient norm: equal" in out
    assert "use --repeats 3" in out, "noise is not known from one run a side"


def test_a_loss_that_is_no_number_is_said(compare):
    status, report, out, _ = compare("--b=--nan-from 5", draws=True)
    assert status == 0
    assert report["compared"]["lm_loss"]["not_finite"] == [None, 5]
    assert report["compared"]["lm_loss"]["last"][1] == "nan", "NaN is no JSON"
    assert "DIFFERS from step 5 on" in out
    assert "B is not finite from step 5 on" in out


def test_noise_is_shown_and_not_taken_for_a_difference(compare):
    status, report, out, _ = compare("--b=--step-time 0.11", "--repeats", "2", job=(JOB, "--noise"))
    assert status == 0
    assert report["measured"]["step_time_s"]["ratio"]["within_noise"] is True
    assert "within noise" in out
    assert "(0.15 s to 0.2 s)" in out
    noise = report["compared"]["lm_loss"]["noise"]
    assert noise["A"]["first_step"] == noise["B"]["first_step"] == 3
    assert noise["A"]["max_abs"] == pytest.approx(1e-6)


def test_different_initial_weights_are_said(compare):
    status, report, out, _ = compare("--b=--weights other")
    assert status == 0
    assert report["initial_weights"]["same"] is False
    assert "NOT THE SAME, so the losses cannot be compared (1 of 1 weights differ between A1 and B1" in out
    _, report, out, _ = compare("--b", "")
    assert report["initial_weights"]["same"] is True
    assert "SHA-256 of all 1 parameters" in out


def test_a_side_that_fails_is_status_1_with_its_last_words(compare, tmp_path):
    order = tmp_path / "order"
    status, report, out, err = compare(
        "--b", "--fail-with 'no such thing'", "--repeats", "3", job=(JOB, "--order", str(order))
    )
    assert status == 1
    assert order.read_text().split() == ["A1", "B1"], "it stops at the first failure"
    assert report["ok"] is False
    assert report["runs"][1]["exit_code"] == 1
    log = tmp_path / "out" / "B1" / "stderr.txt"
    assert f"FAILED B1: ended with exit code 1; see {log}" in out
    assert "no such thing" in err
    assert "line 99" in err
    assert "line 5\n" not in err, "the log's end, not all of it"
    assert "no such thing" in log.read_text()


def test_a_job_that_writes_no_records_has_failed(compare):
    status, found, out, _ = compare("--a", "--no-records")
    assert status == 1
    assert "A1: wrote no " in found["problems"][0]
    assert "must import mindspeed_dsa.megatron_adaptor" in out


def test_a_command_that_cannot_be_started_has_failed(compare):
    status, found, _, _ = compare("--a", "", job=("there-is-no-such-command",))
    assert status == 1
    assert "cannot be started" in found["problems"][0]


@pytest.mark.full
def test_a_run_that_takes_too_long_is_ended(compare, tmp_path):
    status, found, _, _ = compare("--a", "--sleep 1200", "--timeout", "0.1")
    assert status == 1
    assert "was stopped after 6 s (--timeout)" in found["problems"][0]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "out" / "A1" / "pid").read_text()), 0)


def test_ending_compare_ends_its_job(tmp_path):
    command = [sys.executable, "-m", "mindspeed_dsa", "compare", "--a", "--sleep 1200"]
    process = subprocess.Popen([*command, "--output-dir", str(tmp_path / "out"), "--", JOB])
    pid = tmp_path / "out" / "A1" / "pid"
    deadline = time.monotonic() + 300
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_an_earlier_comparison_is_kept(compare, tmp_path):
    compare("--b", "")
    first = (tmp_path / "out" / "compare.json").read_bytes()
    _, _, out, err = compare("--b=--drift-from 2")
    assert (tmp_path / "out" / "compare.json").read_bytes() == first
    assert f"writing to {tmp_path / 'out-2'}" in err
    assert str(tmp_path / "out-2" / "compare.json") in out


def test_the_job_may_write_its_own_records(compare):
    job = (JOB, "--own-metrics", "{out}/mine.jsonl")
    status, found, _, err = compare("--b", "", "--metrics-file", "mine.jsonl", job=job)
    assert status == 0, err
    assert found["steps"]["A"] == 6
    assert compare("--b", "", "--metrics-file", "mine.jsonl")[0] == 2


def test_records_without_times_are_compared_by_their_losses(compare, tmp_path):
    script = tmp_path / "losses.py"
    script.write_text(
        "import sys, json\nopen(sys.argv[1], 'w').write(json.dumps({'step': 1, 'lm_loss': 2.5}))\n"
    )
    job = (str(script), "{out}/m.jsonl")
    status, report, out, err = compare("--b", "", "--metrics-file", "m.jsonl", job=job, draws=True)
    assert status == 0, err
    assert report["measured"] == {}
    assert "1 run(s) per side" in out
    assert "loss: equal to the last bit at all 1 steps" in out
    assert report["initial_weights"]["same"] is None


def test_features_become_flags(compare, feature):
    _, report, _, _ = compare("--features", "faster,better", job=("true",))
    assert report["sides"]["A"]["flags"] == ["--no-better"]
    assert report["sides"]["B"]["flags"] == ["--use-faster", "--better"]
    assert shlex.split(report["runs"][0]["command"])[-2:] == ["true", "--no-better"]


def test_a_feature_that_was_not_on_or_not_off_is_said(compare, feature):
    echo = ("sh", "-c", f"exec {sys.executable} {JOB} --features-on better", "sh")
    _, report, out, _ = compare("--features", "better", job=echo)
    assert report["warnings"] == ["better was on in A1, so the sides do not match the request"]
    _, report, _, _ = compare(
        "--features", "better", job=(*echo[:2], echo[2].replace(" --features-on better", ""))
    )
    assert report["warnings"] == ["better was off in B1, so the sides do not match the request"]
    assert "WARNING: better was on in A1" in out


@pytest.mark.parametrize(
    ("options", "job", "environment", "message"),
    [
        (["--features", "beter"], (JOB,), {}, "there is no feature 'beter'; did you mean better?"),
        (["--features", "--use-faster"], (JOB,), {}, "--use-faster is a flag; its feature is faster"),
        (["--features", "larger"], (JOB,), {}, "larger has no on/off switch"),
        (["--features", "better"], (JOB, "--no-better"), {}, "the job's own command has --no-better"),
        (["--features", "faster"], (JOB, "--use-quicker"), {}, "the job's own command has --use-quicker"),
        (["--features", "better"], (JOB,), {"BETTER": "1"}, "environment sets MINDSPEED_DSA_BETTER"),
        (["--b", "--better"], (JOB,), {"BETTER": "0"}, "environment sets MINDSPEED_DSA_BETTER"),
        (["--b", "--use-fastr"], (JOB,), {}, "--use-fastr is not a flag of this library; did you mean"),
        (["--b", "'"], (JOB,), {}, "cannot be read"),
        (["--b", "", "--nproc", "2"], ("torchrun", JOB), {}, "--nproc is for a job that is given as"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(
    compare, feature, monkeypatch, tmp_path, options, job, environment, message
):
    for name, value in environment.items():
        monkeypatch.setenv(f"MINDSPEED_DSA_{name}", value)
    status, _, _, err = compare(*options, job=job)
    assert status == 2
    assert message in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--", JOB], "specify what to compare"),
        (["--features", "x", "--b", "y", "--", JOB], "specify what to compare"),
        (["--b", "x", "--repeat", "2"], "--repeat: did you mean --repeats?"),
        (["--b", "x", "--train-iters", "2", "--", JOB], "--train-iters is not a flag of compare"),
        (["--b", "x", "--"], "nothing follows --"),
        (["--b", "x", "--repeats", "0"], "0 is not at least 1"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(capsys, argv, message):
    with pytest.raises(SystemExit) as status:
        main(["compare", *argv])
    assert status.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    ["b'\\xff\\xfe'", "b'[1, 2]'", "b'{\"step\": Infinity}'", "b'[' * 100_000"],
    ids=["binary", "list", "endless", "deep"],
)
def test_damaged_records_are_an_error_that_names_file_and_line(compare, tmp_path, line):
    script = tmp_path / "damaged.py"
    script.write_text(
        f"import sys\nopen(sys.argv[1], 'wb').write(b'{{\"step\": 1, \"lm_loss\": 2.5}}\\n' + {line})\n"
    )
    status, report, _, _ = compare("--b", "", "--metrics-file", "m.jsonl", job=(str(script), "{out}/m.jsonl"))
    assert status == 1
    assert f"{tmp_path / 'out' / 'A1' / 'm.jsonl'}, line 2: not a record of a step" in report["problems"][0]
    assert "the job must write one JSON object per line" in report["problems"][0]


@pytest.mark.parametrize(
    "content",
    ["b'\\xff\\xfe'", "b'[]'", "b'{\"features\": [1]}'", "b'{'"],
    ids=["binary", "list", "odd", "cut"],
)
def test_damaged_files_of_ours_are_named(compare, tmp_path, content):
    script = tmp_path / "damaged.py"
    script.write_text(
        f"""import os, runpy, sys
from pathlib import Path
sys.argv = [{JOB!r}]
runpy.run_path({JOB!r}, run_name="__main__")
folder = Path(os.environ["MINDSPEED_DSA_MINDSPEED_REPORT_DIR"])
if folder.name == "B1":
    for name in ("mindspeed_dsa.json", "weights/weights-rank00000.json"):
        (folder / name).write_bytes({content})
"""
    )
    status, report, _, _ = compare("--b", "", job=(str(script),))
    assert status == 0
    folder = tmp_path / "out" / "B1"
    (warning,) = report["warnings"]
    assert warning.startswith(f"B1: {folder / 'mindspeed_dsa.json'} is no record of this library (")
    assert "compare again, so it is not known which features were on in it" in warning
    assert report["initial_weights"]["same"] is None
    expected = f"not verified: {folder / 'weights' / 'weights-rank00000.json'} holds no digests of weights ("
    assert report["initial_weights"]["how"].startswith(expected)


def test_what_the_example_does_by_itself_is_off_on_side_a(monkeypatch):
    monkeypatch.delenv("MINDSPEED_DSA_USE_FUSED_DSA", raising=False)
    example = sides.of_features(["fused-dsa"], [], on_by_default=ExampleJob().on_by_default)
    assert example == sides.Sides(("--no-use-fused-dsa",), ("--use-fused-dsa",), ("fused-dsa",))
    command = CommandJob(("train.py",))
    assert sides.of_features(["fused-dsa"], [], on_by_default=command.on_by_default).a == ()
    # The job's own parser reads both.
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    from dsa_job.arguments import parse_args

    assert [parse_args(example.flags(side)).use_fused_dsa for side in "AB"] == [False, True]
    assert {name for name in ExampleJob().on_by_default if parse_args([]).use_fused_dsa} == {
        "--use-fused-dsa"
    }


def test_the_example_starts_both_sides_from_one_checkpoint(tmp_path):
    job = ExampleJob(("--num-layers", "2"))
    start = job.prepare(tmp_path, ("--no-better",))
    assert start[-6:] == ["2", "--no-better", "--train-iters", "0", "--save", str(tmp_path / "initial")]
    command = job.command(tmp_path, tmp_path / "B1", ("--better",))
    assert command[command.index("--load") + 1] == str(tmp_path / "initial")
    assert "--finetune" in command
    assert command[-1] == "--better"
    assert ExampleJob(("--load", "mine")).prepare(tmp_path, ()) is None
    own = ExampleJob(("--load", "mine")).command(tmp_path, tmp_path / "B1", ())
    assert own.count("--load") == 1


def test_the_example_without_its_script_is_refused(tmp_path):
    with pytest.raises(mindspeed_dsa.SettingsError, match="this installation has no examples"):
        ExampleJob(script=tmp_path / "pretrain_dsa.py")


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_example_for_real(compare, tmp_path, capsys):
    tiny = """--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 --q-lora-rank 16
        --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8 --dsa-indexer-head-dim 8
        --dsa-indexer-topk 8 --seq-length 32 --num-experts 2 --moe-ffn-hidden-size 16 --moe-router-topk 1
        --moe-shared-expert-intermediate-size 16 --micro-batch-size 1 --global-batch-size 2 --train-iters 6
        --lr-warmup-iters 1""".split()

    def run(*options):
        assert main(["compare", "--output-dir", str(tmp_path / "out"), *options, *tiny]) == 0, (
            capsys.readouterr()
        )
        newest = max(tmp_path.glob("out*/compare.json"), key=os.path.getmtime)
        return json.loads(newest.read_text())

    # Recomputation changes no bit of a fused norm. PyTorch's RMSNorm is several operations on CPUs, and
    # autograd adds their gradients in another order.
    comparison = run("--features", "recompute-norm", "--repeats", "2", "--use-fused-rmsnorm")
    assert comparison["warnings"] == []
    assert comparison["initial_weights"]["same"] is True
    assert set(comparison["compared"]) == {"lm_loss", "grad_norm", "indexer_loss"}
    assert all(entry["first_step"] is None for entry in comparison["compared"].values())
    assert "recompute-norm" in comparison["sides"]["B"]["features_on"]
    assert "recompute-norm" not in comparison["sides"]["A"]["features_on"]

    # Another seed: the same weights, because they are loaded, but other data.
    comparison = run("--a", "", "--b", "--seed 4321")
    assert comparison["initial_weights"]["same"] is True
    assert comparison["compared"]["lm_loss"]["first_step"] == 1


def test_the_last_words_are_the_jobs_and_not_its_launchers(tmp_path):
    log = tmp_path / "stderr.txt"
    location = "1123 23:01:31.577000 28043 /env/lib/python3.11/site-packages/torch/distributed/"
    log.write_text(
        f"W{location}run.py:874] *****\npretrain_dsa.py: 2 processes cannot be split\n"
        f"W{location}elastic/multiprocessing/api.py:1028] Sending process 28692 closing signal SIGTERM\n"
        f"E{location}elastic/multiprocessing/api.py:1002] failed (exitcode: 2) local_rank: 0 (pid: 28691)\n"
        "Traceback (most recent call last):\n" + "a line of the launcher's\n" * 40
    )
    assert job.last_lines(log) == ["pretrain_dsa.py: 2 processes cannot be split"]
