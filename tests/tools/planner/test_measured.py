"""Calibration by measured steps: files that are read, factors that are found, words about the rest."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.runs import metrics
from mindspeed_dsa.tools.cli import plan as command
from mindspeed_dsa.tools.planner import arguments, calibration, measured, plan
from mindspeed_dsa.tools.planner.devices import device
from mindspeed_dsa.tools.planner.measured import Record
from mindspeed_dsa.tools.planner.memory import GIB

H200 = device("h200")
FLAGS = (
    "pretrain_gpt.py --num-layers 8 --hidden-size 4096 --num-attention-heads 32 --vocab-size 32000 --bf16 "
    "--seq-length 4096 --micro-batch-size 1 --global-batch-size 64 --num-experts 64 --swiglu "
    "--moe-ffn-hidden-size 1024 --moe-router-topk 4 --moe-token-dispatcher-type alltoall "
    "--disable-bias-linear --moe-grouped-gemm --use-distributed-optimizer"
)
JOBS = {
    "EP16": "--expert-model-parallel-size 16",
    "EP8": "--expert-model-parallel-size 8",
    "PP2": "--expert-model-parallel-size 8 --pipeline-model-parallel-size 2",
    "short": "--expert-model-parallel-size 16 --seq-length 512",
}


def job(name, more=""):
    return arguments.job_of(f"{FLAGS} {JOBS[name]} {more}".split(), 16)


def job_of(record):
    return job(record.name)


def written(folder, content, name="run.json"):
    file = folder / name
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def seconds(of, on):
    return plan.make(of, on).time.total


def fitted(factors, longer=1.0, runs=1):
    """Calibrate with steps of jobs on an H200 with other links and hosts, and perhaps more time."""
    other = calibration.scaled(H200, factors)
    records = runs * [Record(name, longer * seconds(job(name), other)) for name in JOBS]
    return calibration.calibrated(records, job_of, H200, plan.ALLOCATOR)


def test_a_metrics_file_gives_the_typical_step(tmp_path):
    file = tmp_path / "metrics.jsonl"
    for step, time in enumerate([9.0, 8.0, 2.0, 2.0, 2.1, 2.0, 1.9, 2.0, 2.0, 3.0], start=1):
        row = {
            "step": step,
            "step_time_s": time,
            "tokens_per_s": 4096 / time,
            "peak_memory_bytes": step * GIB,
        }
        metrics.append(file, row)
    (record,) = measured.read(file)
    assert record.seconds == 2.0  # the first two of ten steps are left out
    assert record.spread == 1.5
    assert record.memory == 10
    assert record.tokens == pytest.approx(4096)
    assert record.flags is None


def test_a_json_file_has_one_record_or_several(tmp_path):
    one = {"step_s": 2, "devices": 16, "flags": FLAGS, "memory_gib": 40.5, "name": "mine"}
    (record,) = measured.read(written(tmp_path, one))
    assert (record.name, record.seconds, record.memory, record.devices) == ("mine", 2, 40.5, 16)
    assert record.flags[:2] == ("pretrain_gpt.py", "--num-layers")
    records = measured.read(written(tmp_path, [one, {**one, "flags": FLAGS.split()}, {"step_s": 3.0}]))
    assert records[1].flags == record.flags
    assert records[2].flags is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "no records"),
        ("[3]", "record 1 is no object"),
        ('{"steps_s": 3}', "'steps_s', meant is step_s"),
        ("{}", "needs a number above 0 as step_s, not None"),
        ('{"step_s": -1}', "as step_s, not -1"),
        ('{"step_s": true}', "as step_s, not True"),
        ('{"step_s": 1, "flags": "--bf16"}', "has flags, and no devices"),
    ],
)
def test_other_files_are_refused_with_the_form_that_is_read(tmp_path, content, said):
    with pytest.raises(SettingsError, match="only step_s is required") as caught:
        measured.read(written(tmp_path, content))
    assert said in str(caught.value)


def test_a_metrics_file_without_times_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="no record has a step_time_s"):
        measured.read(written(tmp_path, '{"step": 1, "lm_loss": 3.0}\n', "metrics.jsonl"))
    with pytest.raises(SettingsError, match="cannot be read"):
        measured.read(tmp_path / "none.jsonl")


def test_what_is_planned_right_stays():
    found = fitted({})
    assert found.factors == dict.fromkeys(calibration.SCALED, pytest.approx(1.0))
    assert all(run.rest == pytest.approx(1.0) for run in found.runs)


@pytest.mark.parametrize("name", calibration.SCALED)
@pytest.mark.parametrize("factor", [0.75, pytest.param(1.35, marks=pytest.mark.full)])
def test_a_scaled_device_is_found_by_its_steps(name, factor):
    # Several runs of each job weigh more than the prior, which pulls towards 1.
    found = fitted({name: factor}, runs=4)
    assert abs(math.log(found.factors[name] / factor)) < abs(math.log(factor)) / 2
    before = calibration._left([run.record.seconds / run.before.time.total for run in found.runs])
    after = calibration._left([run.rest for run in found.runs])
    assert after < before / 2


def test_the_fit_has_the_least_cost():
    """Neighbours of the fitted factors cost more."""
    true = dict.fromkeys(calibration.SCALED, 0.8)
    found = fitted(true)
    records = [run.record for run in found.runs]

    def cost(factors):
        other = calibration.scaled(H200, factors)
        times = [seconds(job(record.name), other) for record in records]
        apart = [
            calibration._huber(math.log(record.seconds / time) / calibration.APART)
            for record, time in zip(records, times, strict=True)
        ]
        prior = [
            (math.log(factor) / calibration.SCALED[name].spread) ** 2 for name, factor in factors.items()
        ]
        return sum(apart) + sum(prior)

    least = cost(found.factors)
    for name in calibration.SCALED:
        for step in (0.93, 1.07):
            assert cost({**found.factors, name: found.factors[name] * step}) > least


def test_one_untuned_job_does_not_decide_about_the_others():
    other = calibration.scaled(H200, {})
    times = {name: seconds(job(name), other) for name in JOBS}
    records = [Record(name, time * (2.5 if name == "PP2" else 1.0)) for name, time in times.items()]
    found = calibration.calibrated(records, job_of, H200, plan.ALLOCATOR)
    rests = {run.record.name: run.rest for run in found.runs}
    assert rests["EP16"] == pytest.approx(1.0, abs=0.15)
    assert rests["EP8"] == pytest.approx(1.0, abs=0.15)
    said = calibration.text(found)
    assert (
        f"PP2 takes {rests['PP2']:.2f} times as long as planned: as untuned or deterministic jobs do" in said
    )
    assert "EP8 takes" not in said


def test_the_part_that_takes_longer_is_named():
    """Attention takes three times as long; neither links nor host explain it."""
    slow, long = replace(H200, attention=H200.attention / 3), "--seq-length 32768"
    records = [Record(name, seconds(job(name, long), slow)) for name in JOBS]
    found = calibration.calibrated(records, lambda record: job(record.name, long), H200, plan.ALLOCATOR)
    parts = calibration.explanations(found.runs)
    assert parts["attention"] == max(parts.values())
    assert parts["attention"] == pytest.approx(3, rel=0.3)
    assert f"attention x {parts['attention']:.2f}" in calibration.text(found)


def test_faster_steps_question_the_flags():
    said = calibration.text(fitted({}, longer=0.4))
    assert "are its layers, sequence length and recomputation those of the flags?" in said


def test_steps_of_another_device_are_questioned():
    said = calibration.text(fitted({}, longer=20))
    assert "times as long as planned: is --device the run's device" in said


def test_without_links_and_launches_nothing_is_calibrated():
    alone = arguments.job_of(FLAGS.split(), 1)
    record = Record("alone", 1.1 * seconds(alone, H200))
    found = calibration.calibrated([record], lambda _: alone, H200, plan.ALLOCATOR)
    assert "calibrated: nothing, host time and link rates stay as assumed" in calibration.text(found)


def test_memory_and_spread_are_compared():
    record = Record("EP16", seconds(job("EP16"), H200), spread=1.4, memory=50.0)
    found = calibration.calibrated([record], job_of, H200, plan.ALLOCATOR)
    planned = found.runs[0].after.worst.allocated / GIB
    said = calibration.text(found)
    assert f"EP16: 50.0 GiB allocated, {planned:.1f} planned, x {50 / planned:.2f}" in said
    assert "one step in ten takes 1.40 times the median" in said


def test_the_command_plans_another_job_on_the_calibrated_device(tmp_path, capsys):
    slower = calibration.scaled(H200, {"link rates": 0.5})
    record = {"step_s": seconds(job("EP16"), slower), "devices": 16, "name": "mine"}
    file = written(tmp_path, {**record, "flags": f"{FLAGS} {JOBS['EP16']}"})
    out = tmp_path / "plan.json"
    options = ["--device", "h200", "--devices", "16", "--json", str(out), "--measured", str(file)]
    command.run([*options, "--", *FLAGS.split(), *JOBS["PP2"].split()])
    found = json.loads(out.read_text())
    assert found["measured"]["factors"]["link rates"] < 0.9
    assert found["device"]["link"] < H200.link
    assert found["step"]["seconds"] > seconds(job("PP2"), H200)
    assert "mine: EP16 DP16 on 16" in capsys.readouterr().out


def test_without_a_job_the_measured_one_is_planned(tmp_path, capsys):
    file = written(tmp_path, {"step_s": 1.5, "devices": 16, "flags": f"{FLAGS} {JOBS['EP16']}"})
    assert command.run(["--measured", str(file)]) == 0
    assert "EP16 DP16 on 16 x h100: fits" in capsys.readouterr().out


def test_a_metrics_file_is_of_the_planned_job(tmp_path, capsys):
    file = tmp_path / "metrics.jsonl"
    for step in range(1, 11):
        metrics.append(file, {"step": step, "step_time_s": 1.5, "tokens_per_s": 64 * 4096 / 1.5})
    words = ["--measured", str(file), "--", *FLAGS.split(), *JOBS["EP16"].split()]
    command.run(["--devices", "16", *words])
    assert "metrics.jsonl: EP16 DP16 on 16" in capsys.readouterr().out
    with pytest.raises(SettingsError, match="give --devices, the number of devices of the run"):
        command.run(words)
    with pytest.raises(SettingsError, match="its steps have 262,144 tokens, and those of the flags 524,288"):
        command.run(["--devices", "16", *words, "--global-batch-size", "128"])


def test_misspelt_flags_of_a_record_are_named(tmp_path):
    file = written(tmp_path, {"step_s": 1.5, "devices": 16, "flags": f"{FLAGS} --sequence-paralel"})
    with pytest.raises(SettingsError, match="did you mean --sequence-parallel"):
        command.run(["--measured", str(file), "--devices", "16", "--", *FLAGS.split()])
